"""Which verifier state serves which row of the next draft block.

Owns the shift, derived from what each side predicts, and the two source rules. Pure integer arithmetic, on
tensors or on ints; the pool, the draft model, the trainer and the tests all use these few functions.

A round verifies the block `[anchor, d_1 .. d_{B-1}]` at absolute positions `P .. P+B-1` and accepts `a` drafts.
The target's state of row `j` predicts the token at `P+j+1`. The next anchor stands at `P' = P+a+1`; a
mask-predicting drafter predicts at row `t` the token AT `P'+t`, a next-token drafter (`shift_label`) the one at
`P'+t+1`. The state that predicts the same token is therefore row `j = t+a` (or `t+a+1` with `shift_label`).

Source: arXiv 2609.06498, section "relay"; the paper leaves the first row open, so it is a checkpoint field.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch


class RelaySource(enum.StrEnum):
    """Which rejected rows of the verified block are relayed (checkpoint field `relay_source`)."""

    SUFFIX = "suffix"
    """Rows `a+2 .. B-1`, behind the first rejection: the paper's text."""
    FIRST_REJECTION = "first_rejection"
    """Rows `a+1 .. B-1`, the first rejection included: the public precedent."""


class RelayRule(NamedTuple):
    """The alignment of one checkpoint, as two small integers.

    Attributes:
        first_offset: first relayed source row, counted from `a` (2 for `suffix`, 1 for `first_rejection`).
        shift: source row minus (target row + a): 0 for mask predictors, 1 with `shift_label`.
    """

    first_offset: int
    shift: int

    @classmethod
    def of(cls, source: RelaySource, *, shift_label: bool) -> RelayRule:
        """Return the rule of a checkpoint from its `relay_source` and its head's `shift_label`."""
        return cls(first_offset=2 if source is RelaySource.SUFFIX else 1, shift=int(shift_label))

    @property
    def first_row(self) -> int:
        """First row of the next block that may be relayed; row 0, the anchor, never is."""
        return max(1, self.first_offset - self.shift)

    def num_rows(self, block_size: int, accept_len: int) -> int:
        """Return how many rows of the next block a round with `accept_len` accepted drafts can serve."""
        return max(0, block_size - accept_len - self.shift - self.first_row)


class RelayRows(NamedTuple):
    """Where each row of a draft block reads its relay from.

    Attributes:
        source: int64 [..., B], row of the previous verified block; 0 where `mask` is False.
        mask: bool [..., B], True where the row takes a relay.
    """

    source: torch.Tensor
    mask: torch.Tensor


def relay_rows(
    positions: torch.Tensor,  # [..., B] absolute positions of the draft block
    next_prefix_len: torch.Tensor,  # [..., 1] P' of the stored round; negative = nothing stored
    accept_len: torch.Tensor,  # [..., 1] a of the stored round
    *,
    block_size: int,
    rule: RelayRule,
) -> RelayRows:
    """Return the source rows and the mask for a draft block, keyed by absolute position alone.

    No window shift is assumed: a request that advanced by other means than one verified block simply finds
    fewer rows, or none. Full acceptance (`a = B-1`) leaves no row in range by the same comparison.
    """
    row = positions - next_prefix_len  # [..., B]
    source = row + accept_len + rule.shift  # [..., B]
    mask = (next_prefix_len >= 0) & (row >= rule.first_row) & (source < block_size)  # [..., B]
    return RelayRows(source=torch.where(mask, source, 0), mask=mask)
