"""A second look at a drafted block: which of a few likely tokens follow each other, given what verification knew?

A block is drafted in one pass, so its rows do not know each other's tokens; and the last verification left the target's
top-1 at every rejected row, its guess for the very positions that the block drafts, made behind a rejected token. The
rescorer looks at both. Every row has the drafter's best tokens and the stale tokens of the row before, the row and the
row behind as candidates, each with a score of two parts:

- of the row: how far the drafter's logit is behind the best, plus a correction by a small network over signs: did draft
  and stale token agree in the rows before, what had the last block proposed for the same positions (the text that the
  stale token was made behind), how do the rejected token and the one that replaced it fit together (the stale text
  may be the right one, shifted by a row)?
- of the step from the candidate chosen in the row before: a product of two token codes, gated by the row's final
  hidden state, as in DFlash2's candidate selector. Codes are linear in the target's embedding, so that little text
  teaches them.

A walk from the anchor takes the best candidate of each row. Both parts start at zero: then the draft wins.

Owns the candidates, the signs and the parameters `relay_rescore.*`. Tensor operations on fixed shapes only, so that
the draft's CUDA graph captures them. Ours, not the paper's (docs/decisions.md).

Dimensions: N blocks, B block size, R = B - 1 drafted rows, K the drafter's best tokens of a row, C = K + 3 candidates,
W width, E code width, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

TOP_K, CODE_SIZE = 4, 128
"""K and E where nothing else is asked for."""

OFFSETS = (-1, 0, 1)
"""Rows whose stale token is a candidate, and whose earlier proposal is a sign, counted from the drafted one."""

NONE = -1
"""No token."""

_GAP_SCALE, _GAP_FLOOR = 5.0, -20.0  # logits behind the draft's; further behind is all the same
_BOUNDARY_ROWS = 3
_OWN = OFFSETS.index(0)
_NUM_OTHERS = 2 * len(OFFSETS)
_NUM_SIGNS = 5 + 2 * _NUM_OTHERS + 2 * len(OFFSETS) + 4 * _BOUNDARY_ROWS


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


def candidates(best: torch.Tensor, stale: torch.Tensor) -> torch.Tensor:  # [N, R, K], [N, R]
    """Return what a row may take, int64 [N, R, C]: the drafter's best tokens, then the stale tokens by `OFFSETS`."""
    return torch.cat((best, _neighbours(stale)), dim=-1)


class Look(NamedTuple):
    """What a rescorer sees of N drafted blocks.

    Attributes:
        tokens: int64 [N, R, C], `candidates`.
        logits: [N, R, C], the drafter's, of these tokens.
        hidden: [N, R, H], the drafter's final hidden states.
        evidence: of the verified blocks before.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    hidden: torch.Tensor
    evidence: Evidence


TokenCodes = Callable[[torch.Tensor], torch.Tensor]
"""Codes of tokens: int64 [..] -> float32 [.., 2 * E]; those of `NONE` mean nothing."""


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

    def __init__(
        self,
        block_size: int,
        hidden_size: int,
        size: int,
        *,
        top_k: int = TOP_K,
        code_size: int = CODE_SIZE,
        device: str | None = None,
    ) -> None:
        super().__init__()
        f32: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.size, self.top_k, self.code_size = size, top_k, code_size
        self.row = nn.Parameter(torch.zeros(block_size - 1, size, **f32))
        self.relayed = nn.Parameter(torch.zeros(block_size, size, **f32))  # by the number of rows with a stale token
        self.signs = nn.Linear(_NUM_SIGNS, size, **f32)
        self.candidate = nn.Linear(2 + _NUM_OTHERS, size, bias=False, **f32)
        self.inner = nn.Linear(size, size, **f32)
        self.out = nn.Linear(size, 1, **f32)
        self.code = nn.Linear(hidden_size, 2 * code_size, bias=False, **f32)  # as a predecessor, then as a successor
        self.gate = nn.Linear(hidden_size, code_size, bias=False, **f32)
        self.zero_init()

    def zero_init(self) -> None:
        """Zero the last layer of both parts: every draft then stays, being the best or first among equals."""
        for parameter in (self.out.weight, self.out.bias, self.gate.weight):
            nn.init.zeros_(parameter)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RelayRescorer:
        """Move with the drafter, but stay float32 where that is cast."""

        def keep_type(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_type, recurse)

    def codes(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Codes of tokens, float32 [.., 2 * E], from the target's embeddings [.., H]."""
        return self.code(F.normalize(embeddings.float(), dim=-1))

    def row_scores(self, look: Look) -> torch.Tensor:
        """What speaks for the candidates in their row, float32 [N, R, C]; -inf where there is none, or one again."""
        tokens, evidence = look.tokens, look.evidence
        gap = (look.logits.float() - look.logits[..., :1].float()).clamp(_GAP_FLOOR, 0.0)  # [N, R, C]
        gap = gap.masked_fill(tokens == NONE, _GAP_FLOOR)
        others = torch.cat((tokens[..., self.top_k :], _neighbours(evidence.proposed)), dim=-1)  # [N, R, _NUM_OTHERS]
        same = (tokens.unsqueeze(-1) == others.unsqueeze(-2)) & (others != NONE).unsqueeze(-2)  # [N, R, C, _NUM_OTHERS]
        is_draft = tokens == tokens[..., :1]  # [N, R, C]
        of_candidate = torch.cat(((gap / _GAP_SCALE).unsqueeze(-1), is_draft.unsqueeze(-1), same), dim=-1)
        num_relayed = (evidence.stale != NONE).sum(-1)  # [N]
        gaps = torch.stack((gap[..., 1], gap[..., self.top_k + _OWN]), dim=-1)
        signs = _signs(tokens[..., 0], gaps, others, evidence)
        of_row = self.signs(signs) + self.row + self.relayed[num_relayed].unsqueeze(1)  # [N, R, W]
        inner = F.silu(of_row.unsqueeze(-2) + self.candidate(of_candidate))  # [N, R, C, W]
        correction = self.out(F.silu(self.inner(inner))).squeeze(-1)  # [N, R, C]
        repeated = (tokens.unsqueeze(-1) == tokens.unsqueeze(-2)).tril(-1).any(-1)  # [N, R, C]
        absent = repeated | (tokens == NONE)
        return (gap + correction).masked_fill(absent, float("-inf"))

    def step_scores(
        self,
        hidden: torch.Tensor,  # [N, R, H]
        before: torch.Tensor,  # codes [N, R, P, 2 * E] of P tokens in the row before
        tokens: torch.Tensor,  # codes [N, R, C, 2 * E]
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """What speaks for the candidates behind these tokens, float32 [N, R, P, C]."""
        hidden = hidden.float()
        gate = self.gate(F.rms_norm(hidden, hidden.shape[-1:]))  # [N, R, E]
        predecessor = F.dropout(before[..., : self.code_size] * gate.unsqueeze(-2), dropout)
        return predecessor @ tokens[..., self.code_size :].transpose(-1, -2)

    def forward(self, look: Look, codes: TokenCodes, before: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
        """Scores float32 [N, R, C] behind the tokens `before`, int64 [N, R], one in front of every row."""
        steps = self.step_scores(look.hidden, codes(before).unsqueeze(-2), codes(look.tokens), dropout)
        return self.row_scores(look) + steps.squeeze(-2)

    def choose(self, look: Look, codes: TokenCodes) -> torch.Tensor:
        """Return better drafts, int64 [N, R], by a walk from the anchor; the drafts where no stale token is known."""
        tokens, evidence = look.tokens, look.evidence
        of_tokens = codes(tokens)  # [N, R, C, 2 * E]
        anchors = codes(evidence.bonus)[:, None, None].expand_as(of_tokens[:, :1])
        before = torch.cat((anchors, of_tokens[:, :-1]), dim=1)  # [N, R, C, 2 * E]
        scores = self.row_scores(look).unsqueeze(-2) + self.step_scores(look.hidden, before, of_tokens)  # [N, R, C, C]
        best = scores.argmax(-1)  # [N, R, C], by the candidate before
        path = [best[:, 0, :1]]
        for row in range(1, tokens.shape[1]):
            path.append(best[:, row].gather(1, path[-1]))
        chosen = tokens.gather(-1, torch.stack(path, dim=1)).squeeze(-1)  # [N, R]
        relayed = (evidence.stale != NONE).any(-1, keepdim=True)  # [N, 1]
        return torch.where(relayed, chosen, tokens[..., 0])


def _before(signs: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """The signs [N, R, ..] of so many rows earlier; zero in front of the first."""
    return F.pad(signs, (0, 0, rows, 0))[:, : signs.shape[1]]


def _signs(
    drafts: torch.Tensor,  # int64 [N, R]
    gaps: torch.Tensor,  # [N, R, 2]: of the drafter's second best, and of the row's own stale token
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
    per_row = (
        known[..., _OWN, None].float(),
        gaps / _GAP_SCALE,
        _before(own, 2),
        all_before,
        before,
        before.cumsum(1) / 3,
    )
    # The stale text goes on as the new anchor does, or a rejected word comes after all: the text is shifted.
    bonus, rejected = evidence.bonus.unsqueeze(-1), evidence.rejected.unsqueeze(-1)  # [N, 1]
    first_stale, first_proposed, first_drafts = (
        F.pad(tokens, (0, _BOUNDARY_ROWS), value=NONE)[:, :_BOUNDARY_ROWS]
        for tokens in (evidence.stale, evidence.proposed, drafts)
    )
    boundary = (first_stale == bonus, first_stale == rejected, first_drafts == rejected, first_proposed == bonus)
    of_block = torch.cat(boundary, dim=-1).float().unsqueeze(1).expand(-1, drafts.shape[1], -1)
    return torch.cat((*per_row, kept, _before(kept), of_block), dim=-1)
