"""The speculative worker: the host's DFLASH worker, with a relay between its rounds.

Control flow only. A decode round of `DFlashWorkerV2.forward_batch_generation` (0.5.23) calls, in this order, the
draft forward (which reads the pool: `draft_model.py`), `_accept_block` (which knows the drafted and the committed
tokens) and `_append_target_hidden_to_draft_kv_by_loc` (which has just projected the captured states of all rows,
rejected ones included). The last two are overridden to write the pool; a drafter with a rescorer has it behind the
host's head, folded into the draft's graph or eager. Nothing else of the round is touched.

Invariants kept here: I3 verification never sees the relay. I4 prefill, hand-over from a prefill server, flush and
weight update empty the pool's rows. I5 with the relay switched off at start, no pool exists and this class is the
host's worker. I6 no method called during decode reads a tensor on the host.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.runtime_context import get_disagg, get_parallel, get_schedule
from sglang.srt.speculative.dflash_worker_v2 import (
    DFlashWorkerV2,
    _is_all_greedy,
    _resolve_dflash_embedding_module,
)
from sglang.srt.speculative.spec_utils import draft_tp_context

from sglang_dflow.relay.draft_input import EmbedTokens, TokenTable
from sglang_dflow.relay.pool import RelayPool, VerifiedBlock
from sglang_dflow.serving.draft_model import RelayMixin
from sglang_dflow.serving.metrics import RelayMetrics, RoundOutput
from sglang_dflow.serving.rescore import HeadRows, RescoringSampler, ServedRescorer
from sglang_dflow.serving.settings import RelaySettings

logger = logging.getLogger(__name__)


class _Accepted(NamedTuple):
    """What `_accept_block` knew, held until the same round's states are projected.

    Attributes:
        req_pool_indices: int64 [bs].
        prefix_lens: int64 [bs].
        candidates: int64 [bs, B], the host's buffer: it is filled again after the store only.
        accept_len: int32 [bs], likewise.
        bonus: int64 [bs].
        stale: int64 [bs, B], or None where the relay does not read it.
    """

    req_pool_indices: torch.Tensor
    prefix_lens: torch.Tensor
    candidates: torch.Tensor
    accept_len: torch.Tensor
    bonus: torch.Tensor
    stale: torch.Tensor | None


def _is_table(embed: torch.nn.Module) -> bool:
    """Whether looking up ids in `embed.weight` is all that this embedding does."""
    return (
        type(embed) is VocabParallelEmbedding
        and embed.tp_size == 1
        and embed.num_added_embeddings == 0
        and embed.output_dtype is None
        and isinstance(embed.quant_method, UnquantizedEmbeddingMethod)
    )


def _max_requests() -> int:
    """The most requests with a slot in one scheduler, as `KVCacheConfigurator` (0.5.23) bounds them.

    `resolve_max_num_reqs` bounds the running ones; a decode server has further slots for requests in transfer.
    """
    running = max(1, int(get_schedule().max_running_requests) // get_parallel().attn_dp_size)
    disagg = get_disagg()
    if disagg.disaggregation_mode != "decode":
        return running
    return running + int(disagg.disaggregation_decode_extra_slots)


class DFlowWorker(DFlashWorkerV2):
    """Drafts with relayed states, verifies and commits exactly as DFLASH."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._pool: RelayPool | None = None
        self._metrics: RelayMetrics | None = None
        self._req_pool_indices: torch.Tensor | None = None
        self._accepted: _Accepted | None = None
        self._rescore: ServedRescorer | None = None
        self._forget_relayed = False
        super().__init__(*args, **kwargs)
        self.relay_settings = RelaySettings.from_env()
        if self.relay_settings.enabled:
            # Here, because the host sizes its KV cache after this by the memory that is left.
            self._attach_pool(num_rows=1 + _max_requests())
            self._rescore = self._make_rescorer()

    def alloc_memory_pool(self, memory_pool_config: Any = None, req_to_token_pool: Any = None, **kwargs: Any) -> None:
        """Allocate the host's pools, and see that the relay's has a row for every row of the host's request pool.

        Raises:
            RuntimeError: it has too few.
        """
        super().alloc_memory_pool(memory_pool_config=memory_pool_config, req_to_token_pool=req_to_token_pool, **kwargs)
        if self._pool is not None:
            self._check_rows(int(self.model_runner.req_to_token_pool.req_to_token.shape[0]))
            self.model_runner.spec_algorithm.on_hand_over = self._pool.invalidate
            self._metrics = RelayMetrics.of_this_scheduler(int(self.block_size), self.draft_model.dflow_config.rule)
        self._log_relay()

    def _check_rows(self, needed: int) -> None:
        assert self._pool is not None
        rows = self._pool.hidden.shape[0]
        if rows < needed:
            raise RuntimeError(
                f"the relay pool has {rows} rows, but the host's request pool has {needed}: it was expected to keep to "
                "--max-running-requests. Please report this launch; SGLANG_DFLOW_RELAY=off serves without the relay"
            )

    def _attach_pool(self, *, num_rows: int) -> None:
        draft_model: RelayMixin = self.draft_model
        dflow = draft_model.dflow_config
        self._pool = RelayPool(
            num_rows=num_rows,
            block_size=int(self.block_size),
            hidden_size=dflow.hidden_size,
            rule=dflow.rule,
            dtype=self.draft_model_runner.dtype,
            device=self.device,
            stale_token=dflow.relay_stale_token,
            proposals=dflow.relay_rescore_size > 0,
        )
        draft_model.attach_relay(self._pool, self._embed_tokens())

    def _make_rescorer(self) -> ServedRescorer | None:
        rescorer = self.draft_model.relay.relay_rescore
        if rescorer is None:
            return None
        assert self._pool is not None
        lm_head = unwrap_lora_layer(self.target_worker.model_runner.model.lm_head)
        with draft_tp_context(self.draft_parallel_layout):  # the ranks that draft together, as for the host's head
            head = HeadRows(lm_head, get_parallel().tp_group)
        return ServedRescorer(rescorer, self._pool, head, self._embed_tokens())

    def _maybe_build_draft_sampler(self) -> Any:
        """The host's head for the draft's graph; the rescorer in its place where the drafter has one."""
        sampler = super()._maybe_build_draft_sampler()
        if sampler is None or self._rescore is None:
            return sampler
        return RescoringSampler(sampler.out, self._rescore, self.draft_model.drafting_slots)

    def _greedy_sample_from_vocab_parallel_head(self, *, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """The host's eager head, or the rescorer in its place. `hidden_states`: [bs * (B - 1), H]."""
        if self._rescore is None or hidden_states.numel() == 0:
            return super()._greedy_sample_from_vocab_parallel_head(hidden_states=hidden_states, **kwargs)
        assert self._req_pool_indices is not None
        return self._rescore(self._req_pool_indices, hidden_states)

    def _embed_tokens(self) -> EmbedTokens:
        """The embedding that the drafter's own rows come from, chosen and scaled as the host's round does it."""
        target_model = self.target_worker.model_runner.model
        embed = unwrap_lora_layer(_resolve_dflash_embedding_module(self.draft_model, target_model))
        full_table, scale = self._full_embed_gpu, self._noise_embed_scale
        if full_table is not None:
            # Under data-parallel attention the module's collectives would meet idle ranks; the host keeps a full table.
            return TokenTable(full_table, scale)
        if _is_table(embed):
            return TokenTable(embed.weight, scale)
        if scale == 1.0:
            return embed
        return lambda token_ids: embed(token_ids) * scale

    def _log_relay(self) -> None:
        dflow = self.draft_model.dflow_config
        if self._pool is None:
            logger.info("DFLOW relay off by %s: drafts are exactly DFLASH's.", RelaySettings.VARIABLE)
            return
        pool = self._pool
        logger.info(
            "DFLOW relay on. drafter=%s block_size=%d relay_source=%s relay_hidden_size=%d relay_stale_token=%s "
            "relay_rescore_size=%d "
            "codes=%.2f MB "
            "pool=%d rows x %d bytes (%s) = %.2f MB, taken before the KV cache was sized",
            type(self.draft_model).__name__,
            int(self.block_size),
            dflow.relay_source.value,
            dflow.relay_hidden_size,
            dflow.relay_stale_token,
            dflow.relay_rescore_size,
            (0 if self._rescore is None else self._rescore.code_table.nbytes) / 1e6,
            pool.hidden.shape[0],
            sum(pool.row_nbytes.values()),
            ", ".join(f"{name} {size}" for name, size in pool.row_nbytes.items() if size),
            pool.nbytes / 1e6,
        )

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one prefill or one draft-verify round, by the host's method.

        A request that prefills (also one that resumes, or decodes inside a mixed chunk) leaves plain masks for its
        next draft (I2, I4): its row is emptied before anything of this batch can draft from it.
        """
        if self._pool is None:
            return super().forward_batch_generation(batch, *args, **kwargs)
        if self._forget_relayed:
            self._forget_relayed = False
            self._pool.clear()
            if self._rescore is not None:
                self._rescore.refresh()
        self._req_pool_indices = batch.req_pool_indices
        is_extend = batch.forward_mode.is_extend() or batch.is_extend_in_batch
        is_idle = batch.forward_mode.is_idle()
        if is_extend and not is_idle:
            self._pool.invalidate(batch.req_pool_indices)
        result = super().forward_batch_generation(batch, *args, **kwargs)
        if not is_extend and not is_idle:
            self._report_round(result)
        return result

    def _report_round(self, result: Any) -> None:
        """Send what this round relayed and accepted to the scheduler, with the host's copy of the result."""
        assert self._pool is not None and self._metrics is not None and self._req_pool_indices is not None
        rows = self._pool.last_rounds(self._req_pool_indices)  # [bs, 4]
        result.logits_output.auxiliary_device_output = RoundOutput(rows, self._metrics)

    def _accept_block(self, *, candidates: torch.Tensor, prefix_lens: torch.Tensor, **kwargs: Any) -> Any:
        """Accept by the host's rule and note the rejection boundary. `candidates`: [bs, B], `prefix_lens`: [bs]."""
        stale = None
        if self._pool is not None and self._pool.stale is not None:
            stale, kwargs = self._target_top1(kwargs)
        result = super()._accept_block(candidates=candidates, prefix_lens=prefix_lens, **kwargs)
        accept_len, _, bonus, _, _ = result
        if self._pool is not None:
            assert self._req_pool_indices is not None
            self._accepted = _Accepted(
                req_pool_indices=self._req_pool_indices,
                prefix_lens=prefix_lens,
                candidates=candidates,
                accept_len=accept_len,
                bonus=bonus,
                stale=None if stale is None else stale.view(candidates.shape),
            )
        return result

    @staticmethod
    def _target_top1(accept_args: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        """The target's top-1 at every row, [bs * B], and the host's arguments with it where the host would compute it.

        Given `target_predict`, the host accepts greedily; so a batch that samples must not see it.
        """
        top1 = accept_args.get("target_predict")
        if top1 is None:
            top1 = torch.argmax(accept_args["next_token_logits"], dim=-1)
            if _is_all_greedy(accept_args["sampling_info"]):
                accept_args = accept_args | {"target_predict": top1}
        return top1, accept_args

    def _append_target_hidden_to_draft_kv_by_loc(self, *args: Any, commit_lens: Any = None, **kwargs: Any) -> None:
        """Append the committed rows to the draft KV by the host's method; relay the block's projected states.

        `commit_lens` is given for a verified block and absent for a prefill.
        """
        super()._append_target_hidden_to_draft_kv_by_loc(*args, commit_lens=commit_lens, **kwargs)
        projected = self.draft_model.take_projected()  # [N, H]
        if self._pool is None or commit_lens is None:
            return
        accepted, self._accepted = self._accepted, None
        assert accepted is not None and projected is not None
        block = VerifiedBlock(
            hidden=projected.view(-1, int(self.block_size), projected.shape[-1]),  # [bs, B, H]
            prefix_lens=accepted.prefix_lens,
            candidates=accepted.candidates,
            accept_len=accepted.accept_len,
            bonus=accepted.bonus,
            stale=accepted.stale,
        )
        self._pool.store(accepted.req_pool_indices, block)

    def clear_cache_pool(self) -> None:
        """Forget all relayed states with the host's cache flush (I4)."""
        super().clear_cache_pool()
        self.forget_relayed()

    def forget_relayed(self) -> None:
        """Empty the pool before the next iteration reads it.

        Asked from the scheduler's side (cache flush, weight update: hooks/weight_update.py), done at the start of the
        next iteration, so that it is ordered behind a store that is still running on the forward stream.
        """
        self._forget_relayed = True

    @property
    def has_relay_pool(self) -> bool:
        """False where the relay was switched off at start: this worker is then the host's."""
        return self._pool is not None

    def set_relay_enabled(self, enabled: bool) -> None:
        """Switch relaying at run time, from the next draft on.

        Raises:
            ValueError: the relay was switched off at start, so there is no pool to relay from.
        """
        if self._pool is None:
            raise ValueError(
                f"the relay was switched off at start by {RelaySettings.VARIABLE}; restart the server without it"
            )
        self._pool.set_enabled(enabled)

    def relay_state(self) -> dict[str, Any]:
        """What `/server_info` tells of the relay. Reads the switch on the device: not for the decode path."""
        if self._pool is None:
            return {"relay": "off"}
        assert self._metrics is not None
        return {
            "relay": "on" if bool(self._pool.enabled.item()) else "off",
            "relay_source": self.draft_model.dflow_config.relay_source.value,
            "relay_hidden_size": self.draft_model.dflow_config.relay_hidden_size,
            "relay_stale_token": self.draft_model.dflow_config.relay_stale_token,
            "relay_rescore_size": self.draft_model.dflow_config.relay_rescore_size,
            "pool_bytes": self._pool.nbytes,
            **self._metrics.total.as_dict(),
        }
