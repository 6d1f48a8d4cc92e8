"""Where relayed states live between two rounds of a request.

One static set of tensors for all requests, indexed by `req_pool_indices` as the host's `FutureMap` is; row 0 is the
host's padding row and stays empty. Written once after each verification, read by the next draft forward (inside its
CUDA graph), so nothing here allocates, resizes or reads a value on the host while serving.

Invariants kept here: I1 storage never aliases a host buffer (`store` copies). I2 a row is read only by the request
that wrote it, and I4 no relay after prefill, flush or weight update: both by `invalidate` / `clear`, which empty the
row before its new owner can draft.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_dflow.relay.alignment import RelayRows, RelayRule, relay_rows

EMPTY = -1
"""`next_prefix_len` of a row that holds nothing."""


class VerifiedBlock(NamedTuple):
    """One verified block of a batch: what the relay needs to know of it.

    Attributes:
        hidden: [bs, B, H] projected captured states of all rows, `hidden_norm(fc(.))`.
        accept_len: int [bs], `a`.
        next_prefix_len: int64 [bs], `P' = P + a + 1`.
        bonus: int64 [bs], the target's token at `P'`.
        rejected: int64 [bs], the drafted token at `P'`; any valid id on full acceptance.
        stale: int64 [bs, B], the target's own top-1 at every row; None where the relay does not read it.
    """

    hidden: torch.Tensor
    accept_len: torch.Tensor
    next_prefix_len: torch.Tensor
    bonus: torch.Tensor
    rejected: torch.Tensor
    stale: torch.Tensor | None = None


class RelayRead(NamedTuple):
    """What the pool holds for one draft batch.

    Attributes:
        hidden: [bs, R, H] source states of block rows `first_row .. B-1` (`R = B - first_row`).
        mask: bool [bs, R], True where the row takes a relay.
        bonus: int64 [bs].
        rejected: int64 [bs].
        stale: int64 [bs, R], the target's top-1 at each source row; None where the relay does not read it.
    """

    hidden: torch.Tensor
    mask: torch.Tensor
    bonus: torch.Tensor
    rejected: torch.Tensor
    stale: torch.Tensor | None = None


class RelayStats(NamedTuple):
    """Counters since start. `eligible_rows` counts the mask rows of every drafted block, relayed or not."""

    relayed_rows: int
    eligible_rows: int

    @property
    def hit_rate(self) -> float:
        return self.relayed_rows / self.eligible_rows if self.eligible_rows else 0.0


class RelayPool:
    """`num_rows x B x H` states and four integers per request; `B` more with the stale tokens.

    Owner: the worker; allocated once after the host's request pool, lives as long as the process.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        block_size: int,
        hidden_size: int,
        rule: RelayRule,
        dtype: torch.dtype,
        device: torch.device | str,
        stale_token: bool = False,
    ) -> None:
        def ints(fill: int) -> torch.Tensor:
            return torch.full((num_rows,), fill, dtype=torch.int64, device=device)

        self.block_size = block_size
        self.rule = rule
        self.hidden = torch.zeros((num_rows, block_size, hidden_size), dtype=dtype, device=device)
        self.next_prefix_len = ints(EMPTY)  # [num_rows]
        self.accept_len = ints(0)  # [num_rows]
        self.bonus = ints(0)  # [num_rows]
        self.rejected = ints(0)  # [num_rows]
        self.stale: torch.Tensor | None = None
        if stale_token:
            self.stale = torch.zeros((num_rows, block_size), dtype=torch.int64, device=device)
        self.enabled = torch.ones((1,), dtype=torch.bool, device=device)  # runtime switch, read inside the graph
        self.counts = torch.zeros((2,), dtype=torch.int64, device=device)  # relayed, eligible

    @property
    def nbytes(self) -> int:
        """Device bytes of all tensors: `num_rows * (B * H * itemsize + 32 [+ 8 * B])` and a few constants."""
        tensors = [self.hidden, self.next_prefix_len, self.accept_len, self.bonus, self.rejected]
        tensors += [self.enabled, self.counts] + ([] if self.stale is None else [self.stale])
        return sum(t.numel() * t.element_size() for t in tensors)

    def store(self, req_pool_indices: torch.Tensor, block: VerifiedBlock) -> None:  # req_pool_indices: int64 [bs]
        """Remember a verified block, one row per request. Indices must be distinct and non-zero."""
        if req_pool_indices.shape[0] == 0:
            return
        self.hidden.index_copy_(0, req_pool_indices, block.hidden.to(self.hidden.dtype))
        for column, values in (
            (self.next_prefix_len, block.next_prefix_len),
            (self.accept_len, block.accept_len),
            (self.bonus, block.bonus),
            (self.rejected, block.rejected),
        ):
            column.index_copy_(0, req_pool_indices, values.to(torch.int64))
        if self.stale is not None:
            assert block.stale is not None
            self.stale.index_copy_(0, req_pool_indices, block.stale.to(torch.int64))

    def read(
        self,
        req_pool_indices: torch.Tensor,  # int64 [bs]; 0 in padded rows
        positions: torch.Tensor,  # int64 [bs, B] absolute positions of the draft block
    ) -> RelayRead:
        """Return the states that serve this draft block, and count them."""
        first_row = self.rule.first_row
        rows: RelayRows = relay_rows(
            positions[:, first_row:],
            self.next_prefix_len[req_pool_indices].unsqueeze(1),
            self.accept_len[req_pool_indices].unsqueeze(1),
            block_size=self.block_size,
            rule=self.rule,
        )  # [bs, R] each
        mask = rows.mask & self.enabled  # [bs, R]
        self.counts[0] += mask.sum()
        self.counts[1] += (req_pool_indices > 0).sum() * (self.block_size - 1)
        return RelayRead(
            hidden=self.hidden[req_pool_indices.unsqueeze(1), rows.source],  # [bs, R, H]
            mask=mask,
            bonus=self.bonus[req_pool_indices],
            rejected=self.rejected[req_pool_indices],
            stale=None if self.stale is None else self.stale[req_pool_indices.unsqueeze(1), rows.source],  # [bs, R]
        )

    def invalidate(self, req_pool_indices: torch.Tensor) -> None:  # int64 [bs]
        """Empty the rows of these requests: they prefilled, so what the rows hold is not theirs or not current."""
        self.next_prefix_len.index_fill_(0, req_pool_indices, EMPTY)

    def clear(self) -> None:
        """Empty every row (cache flush, weight update)."""
        self.next_prefix_len.fill_(EMPTY)

    def set_enabled(self, enabled: bool) -> None:
        """Turn relaying on or off from the next draft on; off drafts exactly as DFLASH does."""
        self.enabled.fill_(enabled)

    def stats(self) -> RelayStats:
        """Read the counters. Synchronises with the device: for operators' read-outs, never in the decode path."""
        relayed, eligible = self.counts.tolist()
        return RelayStats(relayed_rows=relayed, eligible_rows=eligible)
