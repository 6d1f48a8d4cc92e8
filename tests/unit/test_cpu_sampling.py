"""cpu/sampling.py: the committed token follows the target's distribution, whatever was drafted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats

from sglang_dflow.cpu import sampling
from sglang_dflow.cpu.sampling import compute_sampled_accept_and_bonus, draw, target_distribution

VOCAB = 24
DRAWS = 20_000
# Draws are seeded: these are not flaky bounds but the place of one fixed sample.
P_EXACT = 1e-3
P_BROKEN = 1e-6

SETTINGS = [  # temperature, top-k, top-p, min-p
    pytest.param((1.0, None, None, None), id="plain"),
    pytest.param((0.6, None, None, None), id="temperature"),
    pytest.param((1.3, 7, None, None), id="top-k"),
    pytest.param((1.0, None, 0.8, None), id="top-p"),
    pytest.param((0.9, 12, 0.85, None), id="top-k and top-p"),
    pytest.param((1.2, None, None, 0.15), id="min-p"),
    pytest.param((0.8, 15, 0.9, 0.05), id="all"),
]


def reference_distribution(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> list[float]:
    """Temperature, top-k, renormalise, top-p, renormalise, min-p, in plain Python over one row."""
    import math

    weights = [math.exp(value / temperature) for value in logits]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = order[: top_k or len(order)]
    total = sum(weights[token] for token in kept)
    probs = {token: weights[token] / total for token in kept}
    if top_p is not None:
        before, survivors = 0.0, []
        for token in kept:
            if before <= top_p:
                survivors.append(token)
            before += probs[token]
        total = sum(probs[token] for token in survivors)
        probs = {token: probs[token] / total for token in survivors}
    if min_p is not None:
        floor = min_p * max(probs.values())
        probs = {token: prob for token, prob in probs.items() if prob >= floor}
        total = sum(probs.values())
        probs = {token: prob / total for token, prob in probs.items()}
    return [probs.get(token, 0.0) for token in range(len(weights))]


def info(requests: int, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> Any:
    """What the function reads of the host's `SamplingBatchInfo`, the same for every request."""
    return SimpleNamespace(
        temperatures=torch.full((requests, 1), temperature),
        top_ks=torch.full((requests,), top_k if top_k is not None else 1 << 30, dtype=torch.int32),
        top_ps=torch.full((requests,), top_p if top_p is not None else 1.0),
        min_ps=torch.full((requests,), min_p if min_p is not None else 0.0),
        need_top_k_sampling=top_k is not None,
        need_top_p_sampling=top_p is not None,
        need_min_p_sampling=min_p is not None,
    )


def first_tokens(logits: torch.Tensor, draft: int, setting: tuple[Any, ...]) -> torch.Tensor:
    """Commit one block of 3 in `DRAWS` identical requests; return the first committed token of each."""
    candidates = torch.tensor([[0, draft, 5]]).expand(DRAWS, 3)
    torch.manual_seed(1234)
    accept_len, bonus = compute_sampled_accept_and_bonus(
        candidates=candidates,
        next_token_logits=logits.repeat(DRAWS, 1),
        sampling_info=info(DRAWS, *setting),
        max_top_k=setting[1],
        threshold_single=1.0,
        threshold_acc=1.0,
    )
    return torch.where(accept_len > 0, torch.full_like(bonus, draft), bonus)


def chi_square_p(tokens: torch.Tensor, expected: list[float]) -> float:
    """p-value of the counts against a distribution; tokens of probability 0 must not occur at all."""
    counts = torch.bincount(tokens, minlength=VOCAB).tolist()
    assert all(count == 0 for count, prob in zip(counts, expected, strict=True) if prob == 0.0)
    kept = [(count, prob) for count, prob in zip(counts, expected, strict=True) if prob > 0.0]
    # Bins expected fewer than 5 times are pooled: the chi-square law does not hold for them.
    rare = [pair for pair in kept if pair[1] * DRAWS < 5]
    bins = [pair for pair in kept if pair[1] * DRAWS >= 5]
    if sum(prob for _, prob in rare) * DRAWS >= 5:
        bins.append((sum(count for count, _ in rare), sum(prob for _, prob in rare)))
    scale = sum(count for count, _ in bins) / sum(prob for _, prob in bins)
    return float(stats.chisquare([count for count, _ in bins], [prob * scale for _, prob in bins]).pvalue)


@pytest.fixture
def logits() -> torch.Tensor:
    """Three rows of a block: moderately peaked, as a language model's are."""
    return torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(7)) * 1.5


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rank", [0, 3, 20], ids=["likely draft", "middling draft", "unlikely draft"])
def test_first_token_follows_the_target(logits: torch.Tensor, setting: tuple[Any, ...], rank: int) -> None:
    """Catches any bias of acceptance or bonus, for drafts inside and outside of the filters."""
    draft = int(logits[0].argsort(descending=True)[rank])
    expected = reference_distribution(logits[0].tolist(), *setting)
    assert chi_square_p(first_tokens(logits, draft, setting), expected) > P_EXACT


def _redraw_without_removing(probs: torch.Tensor, uniforms: torch.Tensor, excluded: torch.Tensor) -> torch.Tensor:
    """The classic fault: the rejected draft keeps its probability in the second draw."""
    return draw(probs, uniforms, torch.full_like(excluded, -1))


def test_a_broken_verifier_fails_the_same_test(logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chi-square above has the power to see a bonus drawn without removing the rejected draft."""
    monkeypatch.setattr(sampling, "draw", _redraw_without_removing)
    draft = int(logits[0].argsort(descending=True)[1])
    expected = reference_distribution(logits[0].tolist(), 1.0, None, None, None)
    assert chi_square_p(first_tokens(logits, draft, (1.0, None, None, None)), expected) < P_BROKEN


def test_second_token_follows_its_own_row(logits: torch.Tensor) -> None:
    """Catches rows shifted by one: given an accepted first draft, the next token comes from row 1."""
    draft = int(logits[0].argmax())
    candidates = torch.tensor([[0, draft, 5]]).expand(DRAWS, 3)
    torch.manual_seed(5)
    accept_len, bonus = compute_sampled_accept_and_bonus(
        candidates=candidates,
        next_token_logits=logits.repeat(DRAWS, 1),
        sampling_info=info(DRAWS, 1.0, None, None, None),
        threshold_single=1.0,
        threshold_acc=1.0,
    )
    second = torch.where(accept_len == 2, torch.full_like(bonus, 5), bonus)[accept_len >= 1]
    expected = torch.softmax(logits[1], -1)
    counts = torch.bincount(second, minlength=VOCAB).double()
    deviation = (counts / counts.sum() - expected).abs() / (expected / counts.sum()).sqrt()
    assert float(deviation.max()) < 4.5


def test_greedy_rows_of_a_mixed_batch_are_the_argmax() -> None:
    """Temperature 0 arrives as top-k 1: accepts exactly the argmax, ties and zero uniforms included."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [0.0, 0.0, 2.0, 2.0]]).repeat(2, 1)
    sampling_info = info(2, 1.0, 1, None, None)
    for uniforms in (torch.zeros(2, 2), torch.full((2, 2), 1 - 2**-24)):
        accept_len, bonus = compute_sampled_accept_and_bonus(
            candidates=torch.tensor([[0, 1], [0, 2]]),
            next_token_logits=logits,
            sampling_info=sampling_info,
            max_top_k=1,
            threshold_single=1.0,
            threshold_acc=1.0,
            uniform_samples=uniforms,
            uniform_samples_for_final_sampling=uniforms[:, 0],
        )
        assert accept_len.tolist() == [1, 0]
        assert bonus.tolist() == [2, 1]  # argmax of row 1 after acceptance, argmax of row 0 after rejection


@pytest.mark.parametrize("setting", SETTINGS)
def test_distribution_equals_the_reference(logits: torch.Tensor, setting: tuple[Any, ...]) -> None:
    """Catches filters applied in another order, or without renormalising."""
    temperature, top_k, top_p, min_p = setting
    for max_top_k in (top_k, None):
        found = target_distribution(
            logits,
            temperatures=torch.full((3,), temperature),
            top_ks=None if top_k is None else torch.full((3,), top_k),
            top_ps=None if top_p is None else torch.full((3,), top_p),
            min_ps=None if min_p is None else torch.full((3,), min_p),
            max_top_k=max_top_k,
        )
        expected = [reference_distribution(row, *setting) for row in logits.tolist()]
        torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("prefix", [2, 6, VOCAB])
@pytest.mark.parametrize("setting", SETTINGS)
def test_short_prefixes_fall_back_to_the_whole_order(
    logits: torch.Tensor, setting: tuple[Any, ...], prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a nucleus cut off where the ordered prefix ends instead of where its mass ends."""
    monkeypatch.setattr(sampling, "PREFIX", prefix)
    test_distribution_equals_the_reference(logits, setting)


def test_rows_that_keep_everything_beside_rows_that_do_not() -> None:
    """A request without filters in a batch with filters keeps its whole distribution."""
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3))
    found = target_distribution(
        logits,
        temperatures=torch.ones(2),
        top_ks=torch.tensor([3, 1 << 30]),
        top_ps=torch.tensor([0.5, 1.0]),
        min_ps=None,
        max_top_k=VOCAB,
    )
    torch.testing.assert_close(found[1], torch.softmax(logits[1], -1))
    expected = reference_distribution(logits[0].tolist(), 1.0, 3, 0.5, None)
    torch.testing.assert_close(found[0], torch.tensor(expected))


def test_requests_of_one_batch_keep_their_own_parameters() -> None:
    """Catches parameters spread over the wrong rows: one greedy and one uniform request side by side."""
    logits = torch.tensor([[0.0, 4.0, 0.0]]).repeat(2 * 2, 1)
    sampling_info = info(2, 1.0, 1, None, None)
    sampling_info.top_ks[1] = 1 << 30
    sampling_info.temperatures[1] = 1e6
    torch.manual_seed(0)
    seen: set[int] = set()
    for _ in range(60):
        _, bonus = compute_sampled_accept_and_bonus(
            candidates=torch.zeros(2, 2, dtype=torch.int64),
            next_token_logits=logits,
            sampling_info=sampling_info,
            threshold_single=1.0,
            threshold_acc=1.0,
        )
        assert bonus[0] == 1
        seen.add(int(bonus[1]))
    assert seen == {0, 1, 2}


def test_draw_never_returns_a_token_of_probability_zero() -> None:
    """Catches the edges of the inverse: uniforms at both ends, zeros first and last, everything excluded."""
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).repeat(4, 1)
    uniforms = torch.tensor([0.0, 1 - 2**-24, 0.24, 0.26])
    none = torch.full((4,), -1)
    assert draw(probs, uniforms, none).tolist() == [1, 3, 1, 3]
    assert draw(probs, uniforms, none + 4).tolist() == [1, 1, 1, 1]
    certain = torch.tensor([[0.0, 1.0, 0.0]])
    assert draw(certain, torch.tensor([0.5]), torch.tensor([1])).tolist() == [1]


def test_rows_that_do_not_match_are_refused() -> None:
    """The message names both row counts."""
    with pytest.raises(ValueError, match=r"expected 6 rows .*got 5"):
        compute_sampled_accept_and_bonus(
            candidates=torch.zeros(2, 3, dtype=torch.int64),
            next_token_logits=torch.zeros(5, 4),
            sampling_info=info(2, 1.0, None, None, None),
        )
