"""The training twin of the host's Domino head: a causal correction of a block's logits.

A DFlash block is drafted in one pass, so its rows do not know each other's tokens. Domino adds, to every proposal but
the first, a low-rank correction that does: a GRU reads the tokens proposed so far, its state and the row's hidden
state make a small feature ``c``, and ``logits = base_logits + c @ W.T``. Proposals are then made one after another,
each a small step on the block's hidden states; no further drafter forward.

Owns the head's parameters (names of the host's checkpoints: ``prefix_gru.weight_{ih,hh}_l0``, ``embed_proj.{0,2}
.weight``, no biases), its teacher-forced features, its rollout and its loss. Follows ``domino_greedy_rollout`` of
SGLang 0.5.23 with the full candidate pool; the parity test holds them together. ``W`` starts at zero: an untrained head
proposes what the base logits say.

Proposal ``i`` (0-based) is for the token at ``P + i + 1``. It comes from block row ``i + 1``, or from row ``i`` when
``shift_label`` is set (the drafter then is a next-token predictor); in both cases the GRU has read the anchor and
proposals ``0 .. i-1``. Proposal 0 is the base logits' own (``pure_draft_prefix_len`` 1, the only one the host serves).

Dimensions: N blocks, B block size, H hidden, G GRU width, E feature width, V vocabulary, V' tokens of this step.
Parameters are float32 (master weights) and are cast to the type of the activations where they are used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from sglang_dflow.training.loss import Vocabulary, corrected_cross_entropy, row_weights

PURE_DRAFT_PREFIX_LEN = 1
"""Proposals without correction at the start of a block; SGLang 0.5.23 serves no other value."""

DOMINO_PREFIXES = ("prefix_gru.", "embed_proj.")
"""Names of the head's tensors in a checkpoint."""


class DominoHead(nn.Module):
    """GRU over proposed tokens and a low-rank correction of the logits."""

    def __init__(
        self, hidden_size: int, gru_hidden_dim: int, emb_dim: int, vocab_size: int, *, shift_label: bool
    ) -> None:
        super().__init__()
        self.shift_label = shift_label
        self.prefix_gru = nn.GRU(hidden_size, gru_hidden_dim, batch_first=True, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden_size + gru_hidden_dim, emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(emb_dim, vocab_size, bias=False),
        )
        nn.init.zeros_(self.embed_proj[2].weight)

    def proposal_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """The rows that propose: block hidden states [.., B, H] -> [.., B - 1, H]."""
        return hidden[..., :-1, :] if self.shift_label else hidden[..., 1:, :]

    def output_weight(self, vocabulary: Vocabulary, dtype: torch.dtype) -> torch.Tensor:
        """``W`` for the tokens of a step, [V', E]; differentiable."""
        weight = self.embed_proj[2].weight
        return (weight if len(vocabulary.ids) == len(weight) else weight[vocabulary.ids]).to(dtype)

    def _feature(self, rows: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Rows [.., H] and GRU states [.., G] -> [.., E]."""
        first, activation, _ = self.embed_proj
        return activation(F.linear(torch.cat([rows, state], dim=-1), first.weight.to(rows.dtype)))

    def corrections(
        self,
        hidden: torch.Tensor,  # [N, B, H] after the drafter's final norm
        token_ids: torch.Tensor,  # [N, B] true tokens at P .. P+B-1; row 0 the anchor, the last one unused
        embedding: torch.Tensor,  # [V, H] of the target
    ) -> torch.Tensor:
        """Teacher-forced features c [N, B - 1, E]: ``logits = base_logits + c @ W.T``; zero for the first proposal."""
        rows = self.proposal_rows(hidden)
        prefix = F.embedding(token_ids[:, :-1], embedding).to(rows.dtype)  # [N, B - 1, H]
        start = rows.new_zeros(1, len(rows), self.prefix_gru.hidden_size)
        weights = [self.prefix_gru.weight_ih_l0.to(rows.dtype), self.prefix_gru.weight_hh_l0.to(rows.dtype)]
        states, _ = torch.gru(prefix, start, weights, False, 1, 0.0, self.training, False, True)  # [N, B - 1, G]
        feature = self._feature(rows[:, 1:], states[:, 1:])  # [N, B - 2, E]
        return torch.cat([feature.new_zeros(len(rows), PURE_DRAFT_PREFIX_LEN, feature.shape[-1]), feature], dim=1)

    @torch.no_grad()
    def teacher_forced(
        self,
        hidden: torch.Tensor,  # [N, B, H]
        token_ids: torch.Tensor,  # [N, B] true tokens at P .. P+B-1
        embedding: torch.Tensor,  # [V, H] of the target
        vocabulary: Vocabulary,
        chunk: int = 256,
    ) -> torch.Tensor:
        """Top-1 of every row given the true tokens before it, [N, B - 1]: what training sees and serving never does."""
        dtype = vocabulary.head.dtype
        output = self.output_weight(vocabulary, dtype)
        features = self.corrections(hidden.to(dtype), token_ids, embedding)
        flat = (t.to(dtype).flatten(0, 1).split(chunk) for t in (self.proposal_rows(hidden), features))
        top = [(F.linear(rows, vocabulary.head) + F.linear(c, output)).argmax(-1) for rows, c in zip(*flat)]
        return vocabulary.ids[torch.cat(top)].view(len(hidden), -1)

    @torch.no_grad()
    def rollout(
        self,
        hidden: torch.Tensor,  # [N, B, H]
        anchor_ids: torch.Tensor,  # [N]
        embedding: torch.Tensor,  # [V, H] of the target
        vocabulary: Vocabulary,
        chunk: int = 256,
    ) -> torch.Tensor:
        """Greedy proposals [N, B - 1] (token ids), each corrected by those before it.

        Top-1 over ``vocabulary`` without its bias: ``full_vocabulary(head)`` gives what the host proposes.
        """
        dtype = vocabulary.head.dtype
        output = self.output_weight(vocabulary, dtype)
        parts = zip(self.proposal_rows(hidden).to(dtype).split(chunk), anchor_ids.split(chunk))
        return torch.cat([self._rollout(rows, ids, embedding, vocabulary, output) for rows, ids in parts])

    def _rollout(
        self,
        rows: torch.Tensor,  # [n, B - 1, H]
        anchor_ids: torch.Tensor,  # [n]
        embedding: torch.Tensor,
        vocabulary: Vocabulary,
        output: torch.Tensor,  # [V', E]
    ) -> torch.Tensor:
        weights = (self.prefix_gru.weight_ih_l0.to(rows.dtype), self.prefix_gru.weight_hh_l0.to(rows.dtype))
        state = rows.new_zeros(len(rows), self.prefix_gru.hidden_size)
        token, proposals = anchor_ids, []
        for index in range(rows.shape[1]):
            state = torch.gru_cell(F.embedding(token, embedding).to(rows.dtype), state, *weights)  # [n, G]
            row = rows[:, index]
            logits = F.linear(row, vocabulary.head)  # [n, V']
            if index >= PURE_DRAFT_PREFIX_LEN:
                # Two products and a sum, not one over concatenated features: rounded as the host rounds.
                logits += F.linear(self._feature(row, state), output)
            token = vocabulary.ids[logits.argmax(-1)]
            proposals.append(token)
        return torch.stack(proposals, dim=1)


class DominoLoss(NamedTuple):
    """Loss of a batch of blocks and what to report of it."""

    loss: torch.Tensor  # scalar: (1 - base_weight) * corrected + base_weight * base
    corrected: torch.Tensor  # scalar, without gradient
    base: torch.Tensor  # scalar, without gradient
    correct: torch.Tensor  # [N, B - 1] bool, corrected top-1 right, given the true tokens before it
    base_correct: torch.Tensor  # [N, B - 1] bool, base top-1 right
    valid: torch.Tensor  # [N, B - 1] bool, proposals that have a label


def domino_loss(
    head: DominoHead,
    hidden: torch.Tensor,  # [N, B, H]
    labels: torch.Tensor,  # [N, B] token at P + t; row 0 the anchor; any token behind the end
    valid: torch.Tensor,  # [N, B] rows with a label
    embedding: torch.Tensor,  # [V, H] of the target
    vocabulary: Vocabulary,
    gamma: float,
    base_weight: float = 0.5,
    chunk: int = 256,
) -> DominoLoss:
    """Decayed cross entropy of N blocks' base and corrected logits, each normalised by the sum of the weights.

    Teacher forcing loses nothing for acceptance: a greedy proposal counts only if all before it were right, so the
    accepted lengths of ``correct`` are those of the rollout over the same vocabulary.

    ``base_weight`` in 0..1 keeps the base logits, which the first proposal and the correction stand on, trained.
    """
    if not 0.0 <= base_weight <= 1.0:
        raise ValueError(f"base_weight is {base_weight}, expected 0..1: the base logits' share of the Domino loss.")
    count, block, _ = hidden.shape
    weights = row_weights(block, gamma)[None, 1:] * valid[:, 1:]  # [N, B - 1]
    weights = weights / weights.sum().clamp_min(1e-9)
    known = torch.where(valid[:, 1:], labels[:, 1:], vocabulary.ids[0])  # [N, B - 1]
    correction = head.corrections(hidden, labels, embedding)
    result = corrected_cross_entropy(
        head.proposal_rows(hidden).flatten(0, 1),
        correction.flatten(0, 1),
        head.output_weight(vocabulary, hidden.dtype),
        vocabulary,
        vocabulary.rows_of(known).flatten(),
        weights.flatten(),
        base_weight,
        chunk,
    )
    shape = (count, block - 1)
    return DominoLoss(
        result.loss,
        result.corrected,
        result.base,
        result.correct.view(shape),
        result.base_correct.view(shape),
        valid[:, 1:],
    )
