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
from sglang_dflow.relay.rescore import NONE, Evidence, proposals_by_row

EMPTY = -1
"""`next_prefix_len` of a row that holds nothing."""


class VerifiedBlock(NamedTuple):
    """One verified block of a batch: what the relay needs to know of it.

    Attributes:
        hidden: [bs, B, H] projected captured states of all rows, `hidden_norm(fc(.))`.
        prefix_lens: int [bs], `P`, absolute position of the block's anchor.
        candidates: int [bs, B], the verified tokens: anchor and drafts.
        accept_len: int [bs], `a`.
        bonus: int [bs], the target's token at `P' = P + a + 1`.
        stale: int [bs, B], the target's own top-1 at every row; None where the relay does not read it.
    """

    hidden: torch.Tensor
    prefix_lens: torch.Tensor
    candidates: torch.Tensor
    accept_len: torch.Tensor
    bonus: torch.Tensor
    stale: torch.Tensor | None = None


class RelayRead(NamedTuple):
    """What the pool holds for one draft batch.

    Attributes:
        hidden: [bs, R, H] source states of block rows `first_row .. B-1` (`R = B - first_row`).
        mask: bool [bs, R], True where the row takes a relay.
        accept_len: int64 [bs], `a` of the stored round; `EMPTY` where none ends at this draft's first position.
        bonus: int64 [bs].
        rejected: int64 [bs].
        stale: int64 [bs, R], the target's top-1 at each source row; None where the relay does not read it.
    """

    hidden: torch.Tensor
    mask: torch.Tensor
    accept_len: torch.Tensor
    bonus: torch.Tensor
    rejected: torch.Tensor
    stale: torch.Tensor | None = None


class DraftRows(NamedTuple):
    """What became of the rows that a draft could relay, by request.

    Attributes:
        relayed: int64 [bs], rows that took a relay.
        non_finite: int64 [bs], rows refused because their relay was not finite.
        accept_len: int64 [bs], `a` of the round that they come from; `EMPTY` where the pool holds none for this draft.
    """

    relayed: torch.Tensor
    non_finite: torch.Tensor
    accept_len: torch.Tensor


class RelayPool:
    """`num_rows x B x H` states and four integers per request; `B` more with stale tokens, and with proposals.

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
        proposals: bool = False,  # keep the verified tokens, for a rescorer
        use_kernels: bool | None = None,  # default: on CUDA
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
        self.proposed: torch.Tensor | None = None
        if proposals:
            self.proposed = torch.zeros((num_rows, block_size), dtype=torch.int64, device=device)
        self.enabled = torch.ones((1,), dtype=torch.bool, device=device)  # runtime switch, read inside the graph
        self.use_kernels = torch.device(device).type == "cuda" if use_kernels is None else use_kernels
        self.row_stats: torch.Tensor | None = None  # mean and variance of every state, for the kernels' LayerNorm
        if self.use_kernels:
            self.row_stats = torch.zeros((num_rows, block_size, 2), dtype=torch.float32, device=device)
        # Each slot's last round: the columns of `DraftRows` (written in the draft's graph), then `a` (by `store`).
        self.rounds = torch.zeros((num_rows, 4), dtype=torch.int64, device=device)

    @property
    def row_nbytes(self) -> dict[str, int]:
        """Device bytes of one row by what they hold.

        `B * H * itemsize` for the states, 64 for the integers, `8 * B` for stale tokens, as much for proposals and for
        the kernels' statistics.
        """
        integers = (self.next_prefix_len, self.accept_len, self.bonus, self.rejected, self.rounds)
        columns: dict[str, tuple[torch.Tensor | None, ...]] = {
            "states": (self.hidden,),
            "integers": integers,
            "stale": (self.stale,),
            "proposed": (self.proposed,),
            "statistics": (self.row_stats,),
        }
        return {name: sum(t[0].nbytes for t in tensors if t is not None) for name, tensors in columns.items()}

    @property
    def nbytes(self) -> int:
        """Device bytes of all tensors: the rows and the switch."""
        return self.hidden.shape[0] * sum(self.row_nbytes.values()) + self.enabled.nbytes

    def store(self, req_pool_indices: torch.Tensor, block: VerifiedBlock) -> None:  # req_pool_indices: int64 [bs]
        """Remember a verified block, one row per request. Indices must be distinct and non-zero."""
        if req_pool_indices.shape[0] == 0:
            return
        if self.proposed is not None:
            self.proposed.index_copy_(0, req_pool_indices, block.candidates.to(torch.int64))
        if self.use_kernels:
            from sglang_dflow.relay.kernels.store import relay_store

            return relay_store(self, req_pool_indices, block)
        boundary = block.accept_len.to(torch.int64) + 1  # [bs], row a+1
        # On full acceptance nothing was rejected and nothing will be relayed: any drafted token does.
        row = boundary.clamp_max(self.block_size - 1).unsqueeze(1)  # [bs, 1]
        self.hidden.index_copy_(0, req_pool_indices, block.hidden.to(self.hidden.dtype))
        for column, values in (
            (self.next_prefix_len, block.prefix_lens + boundary),
            (self.accept_len, block.accept_len),
            (self.bonus, block.bonus),
            (self.rejected, block.candidates.gather(1, row).squeeze(1)),
        ):
            column.index_copy_(0, req_pool_indices, values.to(torch.int64))
        self.rounds[:, 3].index_copy_(0, req_pool_indices, block.accept_len.to(torch.int64))
        if self.stale is not None:
            assert block.stale is not None
            self.stale.index_copy_(0, req_pool_indices, block.stale.to(torch.int64))

    def read(
        self,
        req_pool_indices: torch.Tensor,  # int64 [bs]; 0 in padded rows
        positions: torch.Tensor,  # int64 [bs, B] absolute positions of the draft block
    ) -> RelayRead:
        """Return the states that may serve this draft block."""
        first_row = self.rule.first_row
        next_prefix_len, accept_len = self.next_prefix_len[req_pool_indices], self.accept_len[req_pool_indices]  # [bs]
        rows: RelayRows = relay_rows(
            positions[:, first_row:],
            next_prefix_len.unsqueeze(1),
            accept_len.unsqueeze(1),
            block_size=self.block_size,
            rule=self.rule,
        )  # [bs, R] each
        mask = rows.mask & self.enabled  # [bs, R]
        return RelayRead(
            hidden=self.hidden[req_pool_indices.unsqueeze(1), rows.source],  # [bs, R, H]
            mask=mask,
            accept_len=torch.where(next_prefix_len == positions[:, 0], accept_len, EMPTY),
            bonus=self.bonus[req_pool_indices],
            rejected=self.rejected[req_pool_indices],
            stale=None if self.stale is None else self.stale[req_pool_indices.unsqueeze(1), rows.source],  # [bs, R]
        )

    def note_draft(
        self,
        req_pool_indices: torch.Tensor,  # int64 [bs]; 0 in padded rows
        rows: DraftRows,
    ) -> None:
        """Leave what a draft relayed for `evidence` and `last_rounds`. Part of the draft's graph."""
        self.rounds[:, :3].index_copy_(0, req_pool_indices, torch.stack(rows, dim=1))

    def last_rounds(self, req_pool_indices: torch.Tensor) -> torch.Tensor:  # int64 [bs]
        """Return these requests' last round, a copy: int64 [bs, 4], `DraftRows` by column, then the round's `a`."""
        return self.rounds[req_pool_indices]

    def evidence(
        self,
        req_pool_indices: torch.Tensor,  # int64 [bs]; 0 in padded rows
        drafted: torch.Tensor,  # int64 [1, R] drafted rows of a block: 1 .. B - 1
    ) -> Evidence:
        """Return what these requests' drafts, just made, may be rescored with.

        A draft that no stored round ends at, by what it noted itself, has no stale token, as with the relay off.
        """
        assert self.stale is not None and self.proposed is not None
        accept_len = self.rounds[req_pool_indices, DraftRows._fields.index("accept_len"), None]  # [bs, 1]
        rows = relay_rows(
            drafted, accept_len.clamp_max(0), accept_len, block_size=self.block_size, rule=self.rule
        )  # [bs, R] each; rows are counted from the draft's first position, where the stored round ends
        mask = rows.mask & self.enabled
        stale = self.stale[req_pool_indices.unsqueeze(1), rows.source]  # [bs, R]
        return Evidence(
            stale=torch.where(mask, stale, NONE),
            bonus=self.bonus[req_pool_indices],
            rejected=self.rejected[req_pool_indices],
            proposed=proposals_by_row(self.proposed[req_pool_indices], rows.source, mask),
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
