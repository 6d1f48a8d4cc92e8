"""Position-decayed cross entropy of a draft block, over a restricted vocabulary when that is faster.

Owns the weights over block rows and a fused cross entropy whose backward is computed with its forward: the head is
frozen, so only the gradient to the hidden states is needed, and the logits of a few rows at a time never leave the
cache. Source of the decay: the DFlash family, ``w_t = exp(-(t - 1) / gamma)`` for row ``t`` in 1..B-1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


def row_weights(block_size: int, gamma: float) -> torch.Tensor:
    """Loss weight of each block row [B]: 0 for the anchor, ``exp(-(t - 1) / gamma)`` for row t."""
    t = torch.arange(block_size, dtype=torch.float32)
    weights = torch.exp(-(t - 1) / gamma)
    weights[0] = 0.0
    return weights


class Vocabulary(NamedTuple):
    """The tokens that take part in a step's softmax, and the frozen head's rows for them."""

    ids: torch.Tensor  # [V'] token ids, ascending
    head: torch.Tensor  # [V', H]
    bias: torch.Tensor  # [V'] log of how many vocabulary entries a row stands for; 0 except for sampled negatives

    def rows_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of ``tokens`` [..] in this vocabulary; they must be part of it."""
        return torch.searchsorted(self.ids, tokens)


def full_vocabulary(head: torch.Tensor) -> Vocabulary:
    """Every token: the exact softmax."""
    return Vocabulary(torch.arange(head.shape[0]), head, torch.zeros(head.shape[0]))


def sampled_vocabulary(
    head: torch.Tensor,  # [V, H]
    always: torch.Tensor,  # [V] bool: tokens that are always in (the frequent ones)
    labels: torch.Tensor,  # [..] labels of this step
    negatives: int,
    generator: torch.Generator,
) -> Vocabulary:
    """Frequent tokens, this step's labels, and a uniform sample of the rest.

    Each sampled token stands for ``rest / negatives`` others; adding the log of that to its logit makes the sum of
    exponentials an unbiased estimate of the full one, so rare tokens are still pushed down.
    """
    present = always.clone()
    present[labels.flatten()] = True
    rest = torch.nonzero(~present).flatten()
    bias = torch.zeros(head.shape[0])
    if negatives and len(rest):
        count = min(negatives, len(rest))
        chosen = rest[torch.randperm(len(rest), generator=generator, device="cpu")[:count].to(rest.device)]
        present[chosen] = True
        bias[chosen] = torch.log(torch.tensor(len(rest) / count))
    ids = torch.nonzero(present).flatten()
    return Vocabulary(ids, head[ids], bias[ids])


class _FrozenHeadCrossEntropy(torch.autograd.Function):
    """``sum_r w_r * CE(hidden_r @ head.T + bias, label_r)`` with the gradient made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # [R, H]
        head: torch.Tensor,  # [V', H]
        bias: torch.Tensor,  # [V']
        labels: torch.Tensor,  # [R] rows of head
        weights: torch.Tensor,  # [R]
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        losses = torch.empty(hidden.shape[0])
        correct = torch.empty(hidden.shape[0], dtype=torch.bool)
        gradient = torch.empty_like(hidden)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = F.linear(hidden[rows], head).float()  # [chunk, V']
            # Top-1 without the negatives' correction: it is what greedy drafting would propose.
            correct[rows] = logits.argmax(-1) == labels[rows]
            logits += bias
            label = labels[rows, None]
            picked = logits.gather(-1, label)  # [chunk, 1]
            top = logits.amax(-1, keepdim=True)
            probs = logits.sub_(top).exp_()
            total = probs.sum(-1, keepdim=True)
            losses[rows] = (total.log() + top - picked)[:, 0]
            probs.div_(total)
            probs.scatter_add_(-1, label, torch.full_like(picked, -1.0))
            probs.mul_(weights[rows, None])
            gradient[rows] = probs.to(hidden.dtype) @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct)
        return (losses * weights).sum(), correct

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, _grad_correct: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss.to(gradient.dtype), None, None, None, None, None


class BlockLoss(NamedTuple):
    """Loss of a batch of blocks and what to report of it."""

    loss: torch.Tensor  # scalar, weighted mean over rows
    correct: torch.Tensor  # [N, B - 1] bool, top-1 right
    valid: torch.Tensor  # [N, B - 1] bool, rows that have a label


def block_loss(
    hidden: torch.Tensor,  # [N, B, H]
    labels: torch.Tensor,  # [N, B] token at each row's own position; row 0 is ignored
    valid: torch.Tensor,  # [N, B] rows with a label
    vocabulary: Vocabulary,
    gamma: float,
    chunk: int = 256,
) -> BlockLoss:
    """Decayed cross entropy of N blocks, normalised by the sum of the weights."""
    count, block, _ = hidden.shape
    weights = row_weights(block, gamma)[None, 1:] * valid[:, 1:]  # [N, B - 1]
    weights = weights / weights.sum().clamp_min(1e-9)
    rows = hidden[:, 1:].reshape(count * (block - 1), -1)
    known = torch.where(valid[:, 1:], labels[:, 1:], vocabulary.ids[0])
    index = vocabulary.rows_of(known).flatten()
    loss, correct = _FrozenHeadCrossEntropy.apply(
        rows, vocabulary.head, vocabulary.bias, index, weights.flatten(), chunk
    )
    return BlockLoss(loss, correct.view(count, block - 1), valid[:, 1:])


class CorrectedCrossEntropy(NamedTuple):
    """Result of ``corrected_cross_entropy``."""

    loss: torch.Tensor  # scalar
    corrected: torch.Tensor  # scalar, without gradient
    base: torch.Tensor  # scalar, without gradient
    correct: torch.Tensor  # [R] bool, corrected top-1 right
    base_correct: torch.Tensor  # [R] bool


def _cross_entropy_gradient(
    logits: torch.Tensor,  # [R, V'] float32, overwritten
    labels: torch.Tensor,  # [R]
    weights: torch.Tensor,  # [R]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [R] and ``w_r * (softmax(logits_r) - onehot(label_r))`` [R, V'] in the logits' memory."""
    label = labels[:, None]
    picked = logits.gather(-1, label)  # [R, 1]
    top = logits.amax(-1, keepdim=True)
    probs = logits.sub_(top).exp_()
    total = probs.sum(-1, keepdim=True)
    losses = (total.log() + top - picked)[:, 0]
    probs.mul_(weights[:, None] / total)
    return losses, probs.scatter_add_(-1, label, -weights[:, None])


class _CorrectedCrossEntropy(torch.autograd.Function):
    """Cross entropy of base and corrected logits; gradients to hidden, correction and output made in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # [R, H]
        correction: torch.Tensor,  # [R, E]
        output: torch.Tensor,  # [V', E]
        head: torch.Tensor,  # [V', H]
        bias: torch.Tensor,  # [V']
        labels: torch.Tensor,  # [R] rows of head
        weights: torch.Tensor,  # [R]
        base_weight: float,
        chunk: int,
    ) -> tuple[torch.Tensor, ...]:
        count = hidden.shape[0]
        losses = torch.empty(2, count, device=hidden.device)  # corrected, base
        correct = torch.empty(2, count, dtype=torch.bool, device=hidden.device)
        d_hidden, d_correction = torch.empty_like(hidden), torch.empty_like(correction)
        d_output = torch.zeros(output.shape, device=output.device)  # float32: summed over chunks
        for start in range(0, count, chunk):
            rows = slice(start, start + chunk)
            base = F.linear(hidden[rows], head).float()  # [chunk, V']
            final = F.linear(correction[rows], output).float().add_(base)
            for index, logits in enumerate((final, base)):
                # Top-1 without the negatives' correction: it is what greedy drafting would propose.
                correct[index, rows] = logits.argmax(-1) == labels[rows]
                logits += bias
            losses[0, rows], d_final = _cross_entropy_gradient(final, labels[rows], weights[rows] * (1 - base_weight))
            losses[1, rows], d_base = _cross_entropy_gradient(base, labels[rows], weights[rows] * base_weight)
            d_hidden[rows] = d_base.add_(d_final).to(hidden.dtype) @ head
            d_final = d_final.to(output.dtype)
            d_correction[rows] = d_final @ output
            d_output += d_final.T @ correction[rows]
        ctx.save_for_backward(d_hidden, d_correction, d_output.to(output.dtype))
        corrected, plain = (losses * weights).sum(-1).unbind()
        reports = (corrected, plain, *correct.unbind())
        ctx.mark_non_differentiable(*reports)
        return (1 - base_weight) * corrected + base_weight * plain, *reports

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, *_unused: torch.Tensor) -> Any:
        gradients = (gradient * grad_loss.to(gradient.dtype) for gradient in ctx.saved_tensors)
        return *gradients, None, None, None, None, None, None


def corrected_cross_entropy(
    hidden: torch.Tensor,  # [R, H]
    correction: torch.Tensor,  # [R, E]
    output: torch.Tensor,  # [V', E] trained
    vocabulary: Vocabulary,
    labels: torch.Tensor,  # [R] rows of the vocabulary
    weights: torch.Tensor,  # [R] they sum to 1 for a mean
    base_weight: float,
    chunk: int = 256,
) -> CorrectedCrossEntropy:
    """``sum_r w_r * ((1 - base_weight) * CE(base_r + correction_r @ output.T) + base_weight * CE(base_r))``.

    ``base_r = hidden_r @ head.T``; the vocabulary's bias is added to both. The low-rank twin of the frozen head's cross
    entropy: base logits are computed once for both terms, and one product carries both gradients to ``hidden``.
    """
    return CorrectedCrossEntropy(
        *_CorrectedCrossEntropy.apply(
            hidden, correction, output, vocabulary.head, vocabulary.bias, labels, weights, base_weight, chunk
        )
    )


def tau_estimate(correct: torch.Tensor, valid: torch.Tensor) -> float:
    """Mean accepted drafts plus the bonus, over blocks [N, B - 1] drafted from random anchors."""
    return 1.0 + float((correct & valid).long().cumprod(-1).sum(-1).float().mean())
