"""A second look at a drafted block: is the target's own stale token the better draft?

The last verification left the target's top-1 at every rejected row, its guess for the very positions that the next
block drafts, made behind a rejected token. Seldom is it right where the drafter is wrong, but when it is, that can
often be told: by how much the drafter prefers its own token, by whether both agreed in the rows before, by what the
last block had proposed for the same positions (the text that the stale token was made behind), and by how the rejected
token and the one that replaced it fit together (the stale text may be the right one, shifted by a row). The rescorer
is a small network over such signs. It reads no hidden state and no embedding, so it learns from minutes of
rollouts without learning them by heart, with the drafter frozen.

Per row of a block it compares the draft and the stale tokens of the row before, the row and the row behind, each
with how far the drafter's logit of it is behind the draft's plus the network's correction. The correction starts at
zero: then the draft wins.

Owns the candidates, the signs and the parameters `relay_rescore.*`. Tensor operations on fixed shapes only, so that
the draft's CUDA graph captures them. Ours, not the paper's (docs/decisions.md).

Dimensions: N blocks, B block size, R = B - 1 drafted rows, C = 4 candidates, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

OFFSETS = (-1, 0, 1)
"""Rows whose stale token is a candidate, and whose earlier proposal is a sign, counted from the drafted one."""

NONE = -1
"""No token."""

_GAP_SCALE, _GAP_FLOOR = 5.0, -20.0  # logits behind the draft's; further behind is all the same
_BOUNDARY_ROWS = 3
_OWN = OFFSETS.index(0)
_NUM_OTHERS = 2 * len(OFFSETS)
_NUM_SIGNS = 4 + 2 * _NUM_OTHERS + 2 * len(OFFSETS) + 4 * _BOUNDARY_ROWS


class Evidence(NamedTuple):
    """What the verified block before tells of a drafted one.

    Attributes:
        stale: int64 [N, R], the target's top-1 at each row's source; `NONE` in rows without relay.
        bonus: int64 [N], the drafted block's anchor.
        rejected: int64 [N], the draft that the anchor replaced.
        proposed: int64 [N, R], what the verified block had proposed for each row's position; `NONE` where nothing.
    """

    stale: torch.Tensor
    bonus: torch.Tensor
    rejected: torch.Tensor
    proposed: torch.Tensor


def proposals_by_row(
    blocks: torch.Tensor,  # int64 [.., B], verified tokens
    source: torch.Tensor,  # int64 [.., R], source rows of the relayed ones
    mask: torch.Tensor,  # bool [.., R]
) -> torch.Tensor:
    """Return what a verified block had proposed for the position of every relayed row, int64 [.., R]; `NONE`: nothing.

    For drafters whose row t drafts the token at row t (no `shift_label`), the only ones that are rescored.
    """
    proposal = source + 1  # a row's state predicts the token behind it
    last = blocks.shape[-1] - 1
    return torch.where(mask & (proposal <= last), blocks.gather(-1, proposal.clamp_max(last)), NONE)


def candidates(drafts: torch.Tensor, stale: torch.Tensor) -> torch.Tensor:  # [N, R], [N, R]
    """Return the tokens that a row may take, int64 [N, R, C]: the draft, then the stale tokens by `OFFSETS`."""
    return torch.cat((drafts.unsqueeze(-1), _neighbours(stale)), dim=-1)


def _neighbours(tokens: torch.Tensor) -> torch.Tensor:
    """Those of the rows that `OFFSETS` names: [N, R] -> [N, R, len(OFFSETS)]."""
    return torch.stack([_shifted(tokens, offset) for offset in OFFSETS], dim=-1)


def _shifted(stale: torch.Tensor, offset: int) -> torch.Tensor:
    """Row t of the result is row t + offset of `stale`; `NONE` beyond its ends."""
    rows = stale.shape[1]
    padded = F.pad(stale, (max(-offset, 0), max(offset, 0)), value=NONE)
    return padded[:, max(offset, 0) : max(offset, 0) + rows]


class RelayRescorer(nn.Module):
    """The network. Its parameters are float32, whatever the drafter's type: they are few."""

    def __init__(self, block_size: int, size: int, device: str | None = None) -> None:
        super().__init__()
        f32: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.size = size
        self.row = nn.Parameter(torch.zeros(block_size - 1, size, **f32))
        self.relayed = nn.Parameter(torch.zeros(block_size, size, **f32))  # by the number of rows with a stale token
        self.signs = nn.Linear(_NUM_SIGNS, size, **f32)
        self.candidate = nn.Linear(2 + _NUM_OTHERS, size, bias=False, **f32)
        self.inner = nn.Linear(size, size, **f32)
        self.out = nn.Linear(size, 1, **f32)
        self.zero_init()

    def zero_init(self) -> None:
        """Zero the last layer: every draft then stays, being the best or first among equals."""
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RelayRescorer:
        """Move with the drafter, but stay float32 where that is cast."""

        def keep_type(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_type, recurse)

    def forward(
        self,
        tokens: torch.Tensor,  # int64 [N, R, C], `candidates`
        logits: torch.Tensor,  # [N, R, C], the drafter's, of these tokens
        evidence: Evidence,
    ) -> torch.Tensor:
        """Return the candidates' scores, float32 [N, R, C]; -inf where there is none, or twice the same."""
        gap = (logits.float() - logits[..., :1].float()).clamp(_GAP_FLOOR, 0.0)  # [N, R, C], the draft's is the best
        gap = gap.masked_fill(tokens == NONE, _GAP_FLOOR)
        others = torch.cat((tokens[..., 1:], _neighbours(evidence.proposed)), dim=-1)  # [N, R, _NUM_OTHERS]
        same = (tokens.unsqueeze(-1) == others.unsqueeze(-2)) & (others != NONE).unsqueeze(-2)  # [N, R, C, _NUM_OTHERS]
        is_draft = tokens == tokens[..., :1]  # [N, R, C]
        of_candidate = torch.cat(((gap / _GAP_SCALE).unsqueeze(-1), is_draft.unsqueeze(-1), same), dim=-1)
        num_relayed = (evidence.stale != NONE).sum(-1)  # [N]
        signs = _signs(tokens[..., 0], gap, others, evidence)
        of_row = self.signs(signs) + self.row + self.relayed[num_relayed].unsqueeze(1)  # [N, R, W]
        inner = F.silu(of_row.unsqueeze(-2) + self.candidate(of_candidate))  # [N, R, C, W]
        correction = self.out(F.silu(self.inner(inner))).squeeze(-1)  # [N, R, C]
        repeated = (tokens.unsqueeze(-1) == tokens.unsqueeze(-2)).tril(-1).any(-1)  # [N, R, C]
        absent = repeated | (tokens == NONE)
        return (gap + correction).masked_fill(absent, float("-inf"))

    def choose(self, tokens: torch.Tensor, logits: torch.Tensor, evidence: Evidence) -> torch.Tensor:
        """Return the better drafts, int64 [N, R]; the draft itself wins ties and rows without a stale token."""
        best = self(tokens, logits, evidence).argmax(-1, keepdim=True)  # [N, R, 1]
        relayed = (evidence.stale != NONE).any(-1, keepdim=True)  # [N, 1]
        return torch.where(relayed, tokens.gather(-1, best).squeeze(-1), tokens[..., 0])


def _before(signs: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """The signs [N, R, ..] of so many rows earlier; zero in front of the first."""
    return F.pad(signs, (0, 0, rows, 0))[:, : signs.shape[1]]


def _signs(
    drafts: torch.Tensor,  # int64 [N, R]
    gap: torch.Tensor,  # [N, R, C]
    others: torch.Tensor,  # int64 [N, R, _NUM_OTHERS]: stale tokens and proposals, each by `OFFSETS`
    evidence: Evidence,
) -> torch.Tensor:
    """What a row can tell, float32 [N, R, _NUM_SIGNS]."""
    known = others != NONE
    agree = ((others == drafts.unsqueeze(-1)) & known).float()  # [N, R, _NUM_OTHERS]
    own = agree[..., _OWN : _OWN + 1]
    stale, proposed = others.chunk(2, dim=-1)
    kept = ((stale == proposed) & known[..., : len(OFFSETS)]).float()  # the target agreed with the proposal
    before = _before(agree)
    all_before = F.pad(own, (0, 0, 1, 0), value=1.0)[:, :-1].cumprod(1)
    own_gap = gap[..., 1 + _OWN, None] / _GAP_SCALE
    per_row = (known[..., _OWN, None].float(), own_gap, _before(own, 2), all_before, before, before.cumsum(1) / 3)
    # The stale text goes on as the new anchor does, or a rejected word comes after all: the text is shifted.
    bonus, rejected = evidence.bonus.unsqueeze(-1), evidence.rejected.unsqueeze(-1)  # [N, 1]
    first_stale, first_proposed, first_drafts = (
        F.pad(tokens, (0, _BOUNDARY_ROWS), value=NONE)[:, :_BOUNDARY_ROWS]
        for tokens in (evidence.stale, evidence.proposed, drafts)
    )
    boundary = (first_stale == bonus, first_stale == rejected, first_drafts == rejected, first_proposed == bonus)
    of_block = torch.cat(boundary, dim=-1).float().unsqueeze(1).expand(-1, drafts.shape[1], -1)
    return torch.cat((*per_row, kept, _before(kept), of_block), dim=-1)
