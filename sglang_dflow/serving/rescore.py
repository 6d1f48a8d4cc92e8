"""The rescorer in the served round: between the drafter's final states and the verification.

Two places call it, as the host has two for its head. Where the host folds the head into the draft's graph,
`RescoringSampler` stands in for the host's sampler in the same graph; where the head runs eagerly, the worker calls it.
The rescorer reads the head itself, because the host's samplers keep the best token of a row only.

Relies on `DFlashWorkerV2` (0.5.23): samplers are called with the block's final hidden states and leave the drafts in
`out`; the target's head is dense, cut along the vocabulary under tensor parallelism, and nothing is done to its logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.speculative.dflash_utils import is_dense_head_weight

from sglang_dflow.relay.draft_input import EmbedTokens
from sglang_dflow.relay.pool import RelayPool
from sglang_dflow.relay.rescore import Look, RelayRescorer, candidates

_ROWS_AT_ONCE = 1024
"""Of logits, so that a large batch does not hold all of them at once."""


_PART = 256


def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:  # [N, V]
    """Values and indices [N, k] of the largest, in order."""
    if logits.is_cuda:
        from flashinfer import top_k as radix_top_k

        values, indices = radix_top_k(logits, k, sorted=True, deterministic=True)
        return values, indices.long()
    rows, size = logits.shape
    if size % _PART or size < k * _PART:
        return torch.topk(logits, k)
    # The k largest stand in the k parts with the largest maxima: a fifth of the time of `topk` on a CPU.
    parts = logits.view(rows, -1, _PART)
    chosen = parts.amax(-1).topk(k).indices  # [N, k]
    values, within = parts.gather(1, chosen.unsqueeze(-1).expand(-1, -1, _PART)).flatten(1).topk(k)
    return values, chosen.gather(1, within // _PART) * _PART + within % _PART


class HeadRows:
    """The target's head for a few tokens a row; the same on every rank."""

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
        self.lm_head, self.weight = lm_head, weight
        self.first = 0 if shard is None else int(shard.org_vocab_start_index)
        self.count = int(weight.shape[0]) if shard is None else int(shard.num_org_elements)
        self.vocab_size = self.count if shard is None else int(lm_head.org_vocab_size)
        self.group = tp_group if self.count < self.vocab_size and tp_group.world_size > 1 else None

    def best(self, hidden: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:  # [N, H]
        """Return the tokens with the largest logits in order, int64 [N, k], and their logits, float32 [N, k]."""
        parts = [top_k(self.all_logits(part), k) for part in hidden.split(_ROWS_AT_ONCE)]
        logits = torch.cat([values for values, _ in parts]).float()
        tokens = torch.cat([indices for _, indices in parts]) + self.first
        if self.group is None:
            return tokens, logits
        # Ranks hold ascending parts of the vocabulary.
        logits, tokens = self.group.all_gather(logits, dim=-1), self.group.all_gather(tokens, dim=-1)
        logits, chosen = torch.topk(logits, k)
        return tokens.gather(-1, chosen), logits

    def all_logits(self, hidden: torch.Tensor) -> torch.Tensor:  # [N, H]
        """Return the logits of this rank's part of the vocabulary, [N, count]."""
        method = getattr(self.lm_head, "quant_method", None)
        if method is None or hidden.is_cuda:
            return hidden.to(self.weight.dtype) @ self.weight[: self.count].T
        logits: torch.Tensor = method.apply(self.lm_head, hidden)  # by packed weights on the CPU platform
        return logits[:, : self.count].contiguous()

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
    """Chooses the drafts of a round.

    Owns the codes of the whole vocabulary, float32 [V, 2 * E], so that a round looks codes up instead of embeddings.
    """

    def __init__(self, rescorer: RelayRescorer, pool: RelayPool, head: HeadRows, embed_tokens: EmbedTokens) -> None:
        self.rescorer, self.pool, self.head = rescorer, pool, head
        self._embed_tokens = embed_tokens
        device = pool.hidden.device
        self.rows = torch.arange(1, pool.block_size, device=device).unsqueeze(0)  # [1, B - 1]
        self.code_table = torch.empty((head.vocab_size, 2 * rescorer.code_size), dtype=torch.float32, device=device)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the codes anew, in place: the target's embedding or the rescorer may have changed."""
        for ids in torch.arange(self.head.vocab_size, device=self.code_table.device).split(_ROWS_AT_ONCE):
            self.code_table[ids] = self.rescorer.codes(self._embed_tokens(ids))

    def codes(self, tokens: torch.Tensor) -> torch.Tensor:  # int64 [..]
        """Return float32 [.., 2 * E]; those of `NONE` mean nothing."""
        return F.embedding(tokens.clamp_min(0), self.code_table)

    @torch.no_grad()
    def __call__(
        self,
        req_pool_indices: torch.Tensor,  # int64 [bs]; 0 in padded rows
        hidden: torch.Tensor,  # [bs * (B - 1), H] final hidden states of the mask rows
    ) -> torch.Tensor:
        """Return the drafts to verify, int64 [bs * (B - 1)]."""
        evidence = self.pool.evidence(req_pool_indices, self.rows)
        shape = evidence.stale.shape  # [bs, B - 1]
        best, logits = self.head.best(hidden, self.rescorer.top_k)
        tokens = candidates(best.view(*shape, -1), evidence.stale)  # [bs, B - 1, C]
        stale_logits = self.head.logits(hidden, tokens[..., self.rescorer.top_k :].flatten(0, 1))
        logits = torch.cat((logits, stale_logits), dim=-1).view(tokens.shape)
        look = Look(tokens, logits, hidden.view(*shape, -1), evidence)
        return self.rescorer.choose(look, self.codes).view(-1)


class RescoringSampler:
    """The rescorer as a sampler of the host, for the draft's graph."""

    def __init__(self, out: torch.Tensor, rescore: ServedRescorer, slots: Callable[[], torch.Tensor]) -> None:
        self.out = out  # int64, a draft each; static, as the graph needs it
        self._rescore, self._slots = rescore, slots

    def __call__(self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None) -> None:
        """`hidden_states`: [bs * B, H]."""
        block_size = self._rescore.pool.block_size
        rows = hidden_states.view(-1, block_size, hidden_states.shape[-1])[:, 1:].flatten(0, 1)
        self.out[: rows.shape[0]].copy_(self._rescore(self._slots(), rows))
