"""The rescorer in the served round: between the drafter's head and the verification.

Two places call it, as the host has two for its head. Where the host folds the head into the draft's graph,
`RescoringSampler` runs behind it in the same graph; where the head runs eagerly, the worker calls it. Both need the
drafter's logits of four tokens a row, which are read from the head's rows: the host's samplers keep the best only.

Relies on `DFlashWorkerV2` (0.5.23): samplers are called with the block's final hidden states and leave the drafts in
`out`; the target's head is dense, cut along the vocabulary under tensor parallelism, and nothing is done to its logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.speculative.dflash_utils import is_dense_head_weight

from sglang_dflow.relay.pool import RelayPool
from sglang_dflow.relay.rescore import RelayRescorer, candidates


class HeadRows:
    """Logits of a few tokens a row, from the target's head; the same on every rank."""

    def __init__(self, lm_head: Any, tp_group: Any) -> None:
        """See where this rank's part of the vocabulary is.

        Raises:
            ValueError: the head is quantised, or holds tokens that were added to the vocabulary.
        """
        weight: Any = getattr(lm_head, "weight", None)
        if not is_dense_head_weight(weight):
            raise ValueError(
                "this drafter has a rescorer (relay_rescore_size), which reads rows of the target's head, but the head "
                f"({type(lm_head).__name__}) has no dense weight. Set dflow_config.relay_rescore_size to 0 to serve "
                "without the rescorer"
            )
        shard = getattr(lm_head, "shard_indices", None)
        if shard is not None and int(shard.num_added_elements):
            raise ValueError(
                "this drafter has a rescorer (relay_rescore_size), and the target's vocabulary has tokens added to it "
                f"({int(shard.num_added_elements)} here), whose rows it would not find. Set "
                "dflow_config.relay_rescore_size to 0 to serve without the rescorer"
            )
        self.weight: torch.Tensor = weight
        self.first = 0 if shard is None else int(shard.org_vocab_start_index)
        self.count = int(weight.shape[0]) if shard is None else int(shard.num_org_elements)
        is_cut = shard is not None and self.count < int(lm_head.org_vocab_size)
        self.group = tp_group if is_cut and tp_group.world_size > 1 else None

    def logits(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # [N, H], int64 [N, C]
        """Return float32 [N, C]; that of `NONE` means nothing."""
        local = tokens.clamp_min(0) - self.first
        own = (local >= 0) & (local < self.count)
        hidden = hidden.float()  # products in float32, as they were fitted
        columns = [
            (F.embedding(column, self.weight) * hidden).sum(-1) for column in torch.where(own, local, 0).unbind(-1)
        ]  # one candidate after the other: the rows of all at once would take C times the memory
        logits = torch.stack(columns, dim=-1)
        if self.group is None:
            return logits
        total: torch.Tensor = self.group.all_reduce(torch.where(own, logits, 0.0))
        return total


class ServedRescorer:
    """Replaces drafts by stale tokens that score better."""

    def __init__(self, rescorer: RelayRescorer, pool: RelayPool, head: HeadRows) -> None:
        self.rescorer, self.pool, self.head = rescorer, pool, head
        self.rows = torch.arange(1, pool.block_size, device=pool.hidden.device).unsqueeze(0)  # [1, B - 1]

    @torch.no_grad()
    def __call__(
        self,
        req_pool_indices: torch.Tensor,  # int64 [bs]; 0 in padded rows
        hidden: torch.Tensor,  # [bs * (B - 1), H] final hidden states of the mask rows
        drafts: torch.Tensor,  # int64 [bs * (B - 1)]
    ) -> torch.Tensor:
        """Return the drafts to verify, int64 [bs * (B - 1)]."""
        evidence = self.pool.evidence(req_pool_indices, self.rows)
        tokens = candidates(drafts.view(evidence.stale.shape), evidence.stale)  # [bs, B - 1, C]
        logits = self.head.logits(hidden, tokens.flatten(0, 1)).view(tokens.shape)
        return self.rescorer.choose(tokens, logits, evidence).view(-1)


class RescoringSampler:
    """A sampler of the host with the rescorer behind it, in the draft's graph."""

    def __init__(self, sampler: Any, rescore: ServedRescorer, slots: Callable[[], torch.Tensor]) -> None:
        self._sampler, self._rescore, self._slots = sampler, rescore, slots

    @property
    def out(self) -> torch.Tensor:
        """The drafts, int64; the host's own buffer."""
        drafts: torch.Tensor = self._sampler.out
        return drafts

    def __call__(self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None) -> None:
        """`hidden_states`: [bs * B, H]."""
        self._sampler(hidden_states, input_ids)
        block_size = self._rescore.pool.block_size
        rows = hidden_states.view(-1, block_size, hidden_states.shape[-1])[:, 1:].flatten(0, 1)
        drafts = self.out[: rows.shape[0]]
        drafts.copy_(self._rescore(self._slots(), rows, drafts))
