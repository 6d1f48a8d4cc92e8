"""Verification of a greedily drafted block at temperature > 0, in plain torch, exact in distribution.

The host's twin needs CUDA kernels (`tree_speculative_sampling_target_only`, top-k/top-p renormalisation); where
they are missing it decodes sampled requests greedily, which is a different distribution.

Rule, with `p_j` the target's distribution after row `j` (temperature, then top-k, top-p, min-p; penalties and
biases are in the logits already) and `d` the draft for the same position. The draft is a point mass, so: accept
`d` with probability `p_j(d)`; at the first rejection draw from `p_j` without `d`, renormalised; after the last row
draw from `p_{B-1}`. Then a token `x != d` is committed with `(1 - p_j(d)) * p_j(x) / (1 - p_j(d)) = p_j(x)`.

Filters as the host applies them to speculation on CUDA: top-k first, renormalise, top-p, renormalise; equal
probabilities at a cut-off stay together. min-p is the exception: the host's DFLASH verification ignores it; here it is
applied last, against the largest probability. Random numbers come from torch's default generator, as in the host:
per-request seeds have no effect on speculative verification there either.

Symbols: `bs` requests, `B` block size, `V` vocabulary, rows = `bs * B`.
"""

from __future__ import annotations

from typing import Any

import torch

# How many of the most probable tokens are ordered to find a row's cut-off. 64 rows of 49,152 cost 41 ms this way and
# 378 ms with a full sort (one thread, Zen 4), which remains the fallback for rows that reach further.
PREFIX = 1024


def target_distribution(
    logits: torch.Tensor,  # [rows, V]
    *,
    temperatures: torch.Tensor,  # [rows]
    top_ks: torch.Tensor | None,  # [rows], None: off
    top_ps: torch.Tensor | None,  # [rows], None: off
    min_ps: torch.Tensor | None,  # [rows], None: off
    max_top_k: int | None,  # an upper bound of top_ks, None: unknown
) -> torch.Tensor:  # [rows, V] fp32
    """Return what the request asked to be sampled from."""
    probs = torch.softmax(logits.float() / temperatures.unsqueeze(1), dim=-1)
    if top_ks is None and top_ps is None and min_ps is None:
        return probs
    cutoff = torch.zeros_like(probs[:, :1])  # [rows, 1], smallest probability that stays
    if top_ks is not None or top_ps is not None:
        cutoff = _top_k_top_p_cutoff(probs, top_ks, top_ps, max_top_k)
    if min_ps is not None:
        cutoff = torch.maximum(cutoff, probs.amax(dim=-1, keepdim=True) * min_ps.unsqueeze(1))
    probs = probs.masked_fill_(probs < cutoff, 0.0)
    probs = probs.div_(probs.sum(dim=-1, keepdim=True))
    if top_ks is None:
        return probs
    # Greedy requests arrive as top-k 1 and must get the argmax, the first of equal logits.
    greedy = torch.zeros_like(probs).scatter_(1, torch.argmax(logits, dim=-1, keepdim=True), 1.0)
    return torch.where(top_ks.unsqueeze(1) == 1, greedy, probs)


def _top_k_top_p_cutoff(
    probs: torch.Tensor,  # [rows, V]
    top_ks: torch.Tensor | None,  # [rows]
    top_ps: torch.Tensor | None,  # [rows]
    max_top_k: int | None,
) -> torch.Tensor:  # [rows, 1]
    """Return the probability of the last token that top-k, then top-p, keep; 0 where they keep all."""
    rows, vocab_size = probs.shape
    limit = probs.new_full((rows,), vocab_size) if top_ks is None else top_ks.clamp(1, vocab_size)
    nucleus = probs.new_ones(rows) if top_ps is None else top_ps
    prefix = min(PREFIX, vocab_size)
    if max_top_k is not None and max_top_k < prefix:
        prefix = max(int(max_top_k), 1)
    unlimited = (limit >= vocab_size) & (nucleus >= 1.0)  # [rows]
    for length in (prefix, vocab_size):
        ordered = torch.topk(probs, length, dim=-1).values  # [rows, length], descending
        kept = torch.arange(length, device=probs.device) < limit.unsqueeze(1)
        ordered_kept = ordered * kept
        total = torch.where(limit >= vocab_size, 1.0, ordered_kept.sum(dim=-1)).unsqueeze(1)
        mass = torch.cumsum(ordered_kept, dim=-1) / total  # [rows, length]
        # A nucleus may end inside the prefix; its total is known there only without a top-k beyond it.
        settled = unlimited | (limit <= length) | ((limit >= vocab_size) & (mass[:, -1] > nucleus))
        if length == vocab_size or bool(settled.all()):
            break
    kept = kept & (mass - ordered_kept / total <= nucleus.unsqueeze(1))
    last = kept.sum(dim=-1, keepdim=True) - 1  # [rows, 1]; the first token is always kept
    return torch.where(unlimited.unsqueeze(1), 0.0, ordered.gather(1, last))


def draw(
    probs: torch.Tensor,  # [rows, V]
    uniforms: torch.Tensor,  # [rows] in [0, 1)
    excluded: torch.Tensor,  # [rows] int64, token to leave out, -1: none
) -> torch.Tensor:  # [rows] int64
    """Draw one token per row by inverting the cumulative distribution, after removing `excluded`."""
    tokens = torch.arange(probs.shape[1], device=probs.device)
    # fp64: with 50,000 small terms an fp32 cumulative sum is off by more than the smallest probabilities.
    remaining = probs.to(torch.float64).masked_fill(tokens == excluded.unsqueeze(1), 0.0)
    cumulative = torch.cumsum(remaining, dim=-1)
    total = cumulative[:, -1:]
    # The first token whose cumulative mass exceeds the target; tokens of zero mass never do.
    drawn = torch.searchsorted(cumulative, uniforms.to(torch.float64).unsqueeze(1) * total, right=True)
    # Nothing left besides the excluded token (its probability rounded below 1): then it is the sample.
    drawn = torch.where(total > 0, drawn, probs.argmax(dim=-1, keepdim=True))
    return drawn.clamp_(max=probs.shape[1] - 1).squeeze(1)


def compute_sampled_accept_and_bonus(
    *,
    candidates: torch.Tensor,  # [bs, B] int64, column 0 the anchor
    next_token_logits: torch.Tensor,  # [bs * B, V]
    sampling_info: Any,
    max_top_k: int | None = None,
    uniform_top_k_value: int | None = None,
    threshold_single: float | None = None,
    threshold_acc: float | None = None,
    uniform_samples: torch.Tensor | None = None,  # [bs, B]
    uniform_samples_for_final_sampling: torch.Tensor | None = None,  # [bs]
    use_sparse_topk: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return accepted drafts `[bs]` int32 and bonus tokens `[bs]` int64.

    Same signature as the host's `compute_dflash_sampling_correct_drafts_and_bonus`, which this replaces.
    `uniform_top_k_value` and `use_sparse_topk` only choose between kernels there.
    """
    bs, block_size = candidates.shape
    if next_token_logits.shape[0] != bs * block_size:
        raise ValueError(
            f"expected {bs * block_size} rows of logits ({bs} requests x block {block_size}), "
            f"got {next_token_logits.shape[0]}"
        )
    single, accumulated = _thresholds(threshold_single, threshold_acc)
    device = next_token_logits.device
    if uniform_samples is None:
        uniform_samples = torch.rand((bs, block_size), dtype=torch.float32, device=device)
    if uniform_samples_for_final_sampling is None:
        uniform_samples_for_final_sampling = torch.rand((bs,), dtype=torch.float32, device=device)

    probs = _distribution_of_block(next_token_logits, sampling_info, block_size, max_top_k)  # [bs, B, V]
    # Row j judges the draft of row j + 1; the last row judges none, and -1 matches no token.
    proposals = candidates[:, 1:].to(torch.int64)  # [bs, B - 1]
    p_draft = probs[:, :-1].gather(2, proposals.unsqueeze(2)).squeeze(2)  # [bs, B - 1]
    # Strictly below: a uniform of exactly 0 must not accept a token of probability 0.
    accepted = (uniform_samples[:, :-1] < p_draft / accumulated) | (p_draft >= single)
    accept_len = accepted.to(torch.int64).cumprod(dim=1).sum(dim=1)  # [bs]

    boundary = probs[torch.arange(bs, device=device), accept_len]  # [bs, V]
    judged = torch.cat([proposals, proposals.new_full((bs, 1), -1)], dim=1)  # [bs, B]
    excluded = judged.gather(1, accept_len.unsqueeze(1)).squeeze(1)  # [bs]
    bonus = draw(boundary, uniform_samples_for_final_sampling, excluded)
    return accept_len.to(torch.int32), bonus


def _distribution_of_block(
    logits: torch.Tensor, sampling_info: Any, block_size: int, max_top_k: int | None
) -> torch.Tensor:  # [bs, B, V]
    """Return the target's distribution after every row; each request's parameters hold for its whole block."""

    def spread(values: torch.Tensor) -> torch.Tensor:
        return torch.repeat_interleave(values.reshape(-1), block_size)

    return target_distribution(
        logits,
        temperatures=spread(sampling_info.temperatures),
        top_ks=spread(sampling_info.top_ks) if sampling_info.need_top_k_sampling else None,
        top_ps=spread(sampling_info.top_ps) if sampling_info.need_top_p_sampling else None,
        min_ps=spread(sampling_info.min_ps) if sampling_info.need_min_p_sampling else None,
        max_top_k=max_top_k,
    ).view(-1, block_size, logits.shape[-1])


def _thresholds(single: float | None, accumulated: float | None) -> tuple[float, float]:
    """Return the acceptance thresholds, the server's own where the caller gives none (1.0 and 1.0: exact)."""
    if single is None or accumulated is None:
        from sglang.srt.runtime_context import get_spec

        spec = get_spec()
        single = spec.speculative_accept_threshold_single if single is None else single
        accumulated = spec.speculative_accept_threshold_acc if accumulated is None else accumulated
    return float(single), max(float(accumulated), 1e-9)
