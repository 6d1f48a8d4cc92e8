"""Verification of a greedily drafted block at temperature > 0, in plain torch, exact in distribution.

The host's twin needs CUDA kernels (`tree_speculative_sampling_target_only`, top-k/top-p renormalisation); where they are
missing it decodes sampled requests greedily, which is a different distribution.

Rule, with `p_j` the target's distribution after row `j` (temperature, then top-k, top-p, min-p; penalties and biases are
in the logits already) and `d_{j+1}` the draft for the same position. The draft is a point mass, so:
accept `d_{j+1}` with probability `p_j(d_{j+1})`; at the first rejection draw from `p_j` without `d_{j+1}`, renormalised;
after the last row draw from `p_{B-1}`. Then `P(first token = x) = p_0(d) [x = d] + (1 - p_0(d)) p_0(x) [x != d] / (1 - p_0(d)) = p_0(x)`.

Filters as the host applies them to speculation on CUDA: top-k first, renormalise, top-p, renormalise. min-p is the
exception: the host's DFLASH verification ignores it; here it is applied last, against the largest probability.
Symbols: `bs` requests, `B` block size, `V` vocabulary, `K` kept candidates per row (`V` without filters).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class TargetDistribution(NamedTuple):
    """Rows of a filtered, normalised distribution; `token_ids` is None when column `i` is token `i`."""

    probs: torch.Tensor  # [rows, K] fp32
    token_ids: torch.Tensor | None  # [rows, K] int64


def target_distribution(
    logits: torch.Tensor,  # [rows, V]
    *,
    temperatures: torch.Tensor,  # [rows]
    top_ks: torch.Tensor | None,  # [rows], None: off
    top_ps: torch.Tensor | None,  # [rows], None: off
    min_ps: torch.Tensor | None,  # [rows], None: off
    max_top_k: int | None,  # upper bound of top_ks that needs no reading of tensors, None: unknown
) -> TargetDistribution:
    """Return what the request asked to be sampled from."""
    scaled = logits.float() / temperatures.unsqueeze(1)
    if top_ks is None and top_ps is None and min_ps is None:
        return TargetDistribution(torch.softmax(scaled, dim=-1), None)
    vocab_size = scaled.shape[1]
    kept = vocab_size if top_ks is None or max_top_k is None else min(max(int(max_top_k), 1), vocab_size)
    if kept < vocab_size:
        ordered, token_ids = torch.topk(scaled, kept, dim=-1)  # [rows, K], descending
    else:
        ordered, token_ids = torch.sort(scaled, dim=-1, descending=True)
    if top_ks is not None:
        beyond = torch.arange(kept, device=logits.device) >= top_ks.unsqueeze(1)
        ordered = ordered.masked_fill(beyond, float("-inf"))
        # Sorting may order equal logits either way; greedy requests (top-k 1) must get the argmax.
        token_ids[:, 0] = torch.where(top_ks == 1, torch.argmax(logits, dim=-1), token_ids[:, 0])
    probs = torch.softmax(ordered, dim=-1)
    if top_ps is not None:
        mass_before = torch.cumsum(probs, dim=-1) - probs
        probs = _renormalise(probs.masked_fill(mass_before > top_ps.unsqueeze(1), 0.0))
    if min_ps is not None:
        probs = _renormalise(probs.masked_fill(probs < probs[:, :1] * min_ps.unsqueeze(1), 0.0))
    return TargetDistribution(probs, token_ids)


def _renormalise(probs: torch.Tensor) -> torch.Tensor:
    return probs / probs.sum(dim=-1, keepdim=True)


def probability_of(distribution: TargetDistribution, tokens: torch.Tensor) -> torch.Tensor:
    """Return `[rows]`: each row's probability of its own token in `tokens` `[rows]`."""
    probs, token_ids = distribution
    if token_ids is None:
        return probs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return torch.where(token_ids == tokens.unsqueeze(1), probs, 0.0).sum(dim=-1)


def draw(
    distribution: TargetDistribution,
    uniforms: torch.Tensor,  # [rows] in [0, 1)
    excluded: torch.Tensor,  # [rows] int64, token to leave out, -1: none
) -> torch.Tensor:  # [rows] int64
    """Draw one token per row by inverting the cumulative distribution, after removing `excluded`."""
    probs, token_ids = distribution
    columns = torch.arange(probs.shape[1], device=probs.device) if token_ids is None else token_ids
    # fp64: with 50,000 small terms an fp32 cumulative sum is off by more than the smallest probabilities.
    remaining = probs.to(torch.float64).masked_fill(columns == excluded.unsqueeze(1), 0.0)
    cumulative = torch.cumsum(remaining, dim=-1)
    total = cumulative[:, -1:]
    # The first column whose cumulative mass exceeds the target; zero-mass columns never do.
    column = torch.searchsorted(cumulative, uniforms.to(torch.float64).unsqueeze(1) * total, right=True)
    # Nothing left besides the excluded token (its probability rounded below 1): then it is the sample.
    column = torch.where(total > 0, column, probs.argmax(dim=-1, keepdim=True))
    column = column.clamp_(max=probs.shape[1] - 1)
    return (column if token_ids is None else token_ids.gather(1, column)).squeeze(1)


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

    distribution = _distribution_of_block(next_token_logits, sampling_info, block_size, max_top_k)
    # Row j judges the draft of row j + 1; the last row judges none, and -1 matches no token.
    judged = torch.cat([candidates[:, 1:], candidates.new_full((bs, 1), -1)], dim=1).to(
        torch.int64
    )  # [bs, B]
    proposals = judged[:, :-1]
    p_draft = probability_of(distribution, judged.clamp(min=0).reshape(-1)).view(bs, block_size)[:, :-1]
    # Strictly below: a uniform of exactly 0 must not accept a token of probability 0.
    accepted = (uniform_samples[:, :-1] < p_draft / accumulated) | (p_draft >= single)
    accept_len = accepted.to(torch.int32).cumprod(dim=1).sum(dim=1)  # [bs]

    boundary = torch.arange(bs, device=device) * block_size + accept_len  # [bs] row of the bonus
    probs, token_ids = distribution
    at_boundary = TargetDistribution(probs[boundary], None if token_ids is None else token_ids[boundary])
    excluded = torch.cat([proposals, proposals.new_full((bs, 1), -1)], dim=1)
    excluded = excluded.gather(1, accept_len.to(torch.int64).unsqueeze(1)).squeeze(1)  # [bs]
    bonus = draw(at_boundary, uniform_samples_for_final_sampling, excluded)
    return accept_len.to(torch.int32), bonus.to(torch.int64)


def _distribution_of_block(
    logits: torch.Tensor, sampling_info: Any, block_size: int, max_top_k: int | None
) -> TargetDistribution:
    """Spread each request's parameters over its block's rows."""

    def spread(values: torch.Tensor) -> torch.Tensor:
        return torch.repeat_interleave(values.reshape(-1), block_size)

    return target_distribution(
        logits,
        temperatures=spread(sampling_info.temperatures),
        top_ks=spread(sampling_info.top_ks) if sampling_info.need_top_k_sampling else None,
        top_ps=spread(sampling_info.top_ps) if sampling_info.need_top_p_sampling else None,
        min_ps=spread(sampling_info.min_ps) if sampling_info.need_min_p_sampling else None,
        max_top_k=max_top_k,
    )


def _thresholds(single: float | None, accumulated: float | None) -> tuple[float, float]:
    """Return the acceptance thresholds, the server's own where the caller gives none (1.0 and 1.0: exact)."""
    if single is None or accumulated is None:
        from sglang.srt.runtime_context import get_spec

        spec = get_spec()
        single = spec.speculative_accept_threshold_single if single is None else single
        accumulated = spec.speculative_accept_threshold_acc if accumulated is None else accumulated
    return float(single), max(float(accumulated), 1e-9)
