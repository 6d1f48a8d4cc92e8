"""DFLOW as the host's speculative algorithm: one override per question the host asks.

The host dispatches on `is_*` / `supports_*` of the algorithm, so DFLOW answers as DFLASH does and inherits its
branches; where the host compares the *name* DFLASH instead, `host_sites.py` accounts for the site. Start-up checks
are here too: everything wrong with a launch comes in one message before a process is forked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_dflow.serving.launch_checks import check_launch

if TYPE_CHECKING:
    from sglang.srt.managers.overlap_utils import FutureMap

logger = logging.getLogger(__name__)

NAME = "DFLOW"


class DFlowAlgorithm(CustomSpecAlgo):
    """Answers the host's questions about DFLOW; all but the worker as the host's DFLASH answers them.

    Attributes:
        on_hand_over: set by a worker that relays; told the `req_pool_indices`, int64 [bs], of requests that decode here
            next without a prefill here.
    """

    on_hand_over: Callable[[torch.Tensor], None] | None = None

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_mixed_chunk(self) -> bool:
        return SpeculativeAlgorithm.DFLASH.supports_mixed_chunk()

    def supports_target_verify_for_draft(self) -> bool:
        return SpeculativeAlgorithm.DFLASH.supports_target_verify_for_draft()

    def supports_prefill_shared_read_done(self) -> bool:
        return SpeculativeAlgorithm.DFLASH.supports_prefill_shared_read_done()

    def supports_ragged_verify(self) -> bool:
        return SpeculativeAlgorithm.DFLASH.supports_ragged_verify()

    def supports_grammar_overlap(self) -> bool:
        return SpeculativeAlgorithm.DFLASH.supports_grammar_overlap()

    def has_draft_kv(self) -> bool:
        return SpeculativeAlgorithm.DFLASH.has_draft_kv()

    # The rest of the enum's interface, which CustomSpecAlgo 0.5.23 lacks although the host calls it.

    def carries_draft_hidden_states(self) -> bool:
        return SpeculativeAlgorithm.DFLASH.carries_draft_hidden_states()

    def need_topk(self) -> bool:
        return SpeculativeAlgorithm.DFLASH.need_topk()

    def create_future_map(self, *args: Any, **kwargs: Any) -> FutureMap:
        from sglang.srt.managers.overlap_utils import FutureMap

        device, req_to_token_pool, *rest = args
        return FutureMap(device, self, req_to_token_pool, *rest, **kwargs)

    def build_disagg_draft_input(self, batch: Any, last_tokens_tensor: torch.Tensor, future_map: FutureMap) -> Any:
        """DFLASH's first draft input of requests handed over to a decode server; none of them has a relay yet.

        The host asks this once of every request before it decodes on a decode server (also of one that resumes after a
        retraction), behind every forward that could still write the request's slot (`_get_new_prebuilt_batch` waits).
        """
        if self.on_hand_over is not None:
            self.on_hand_over(batch.req_pool_indices)
        return SpeculativeAlgorithm.DFLASH.build_disagg_draft_input(batch, last_tokens_tensor, future_map)

    def get_platform_worker_cls(self) -> type | None:
        """None: a platform's replacement for the DFLASH worker knows nothing of the relay."""
        return None

    def handle_server_args(self, server_args: Any) -> None:
        """Refuse what cannot be served, then resolve block size, draft backend and limits as the host does for DFLASH.

        `_handle_dflash` reads and declares through the stand-in that the host hands to a registered algorithm: its
        declarations land in the record's own list.
        """
        from sglang.srt.arg_groups.speculative_hook import _handle_dflash

        check_launch(server_args)
        _handle_dflash(server_args)
        if server_args.speculative_draft_window_size is not None:
            logger.info(
                "DFLOW honours --speculative-draft-window-size=%d; the host's warning goes by the name DFLASH.",
                server_args.speculative_draft_window_size,
            )


class RefusedAlgorithm(CustomSpecAlgo):
    """Holds the name DFLOW where the product cannot serve, so that a launch stops with the reason."""

    problem = "sglang-dflow could not be loaded"

    def handle_server_args(self, server_args: Any) -> None:
        raise ValueError(f"DFLOW cannot start: {self.problem}")
