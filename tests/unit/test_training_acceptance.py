"""acceptance.py: tau, acceptance by depth, paired bootstrap intervals."""

from __future__ import annotations

import pytest
import torch

from sglang_dflow.training.acceptance import Acceptance, Outcome, interval, summarise, tau_draws


def _arm(*pairs: tuple[int, int]) -> Acceptance:
    """An arm of (tokens, rounds) per conversation."""
    return Acceptance(tuple(Outcome(f"p/{i}", t, r, None) for i, (t, r) in enumerate(pairs)), block_size=4)


def test_tau_is_over_all_rounds_and_depths_are_prefixes() -> None:
    """Catches a mean of per-conversation taus, counting answers that were never speculated, and exact depths."""
    outcomes = (Outcome("a", 10, 4, (1, 1, 1, 1)), Outcome("b", 2, 2, (2,)), Outcome("c", 1, 0, ()))
    measured = Acceptance(outcomes, block_size=4, relayed_rows=9, mask_rows=18)
    assert measured.tau == 12 / 6
    assert measured.by_depth == [3 / 6, 2 / 6, 1 / 6]
    assert measured.hit_rate == 0.5
    assert _arm((10, 4)).by_depth is None


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """Catches a bootstrap over rounds (too narrow), one-sided quantiles and a wrong level: 200 experiments of 60
    prompts with a prompt effect; 95 % intervals should miss the true tau about 10 times (one sd: 3)."""
    generator = torch.Generator().manual_seed(1)
    missed = 0
    for _ in range(200):
        level = 1.5 + torch.rand(60, generator=generator)  # a prompt's own tau, mean 2
        arm = _arm(*[(int(t), 100) for t in (100 * level).round()])
        low, high = interval(tau_draws([arm], generator, draws=400)[0])
        missed += not low <= 2.0 <= high
    assert 2 <= missed <= 24


def test_ratio_is_paired_by_prompt() -> None:
    """Catches arms resampled independently: every prompt gains 10 %, however different the prompts are."""
    off = _arm((100, 100), (200, 100), (400, 100), (800, 100))
    on = _arm((110, 100), (220, 100), (440, 100), (880, 100))
    by_set, mean = summarise({"x": {"relay_off": off, "relay_on": on}, "y": {"relay_off": off, "relay_on": on}})
    for summary in (by_set["x"], mean):
        assert summary.ratio is not None
        assert summary.ratio.ratio == pytest.approx(1.1)
        assert summary.ratio.interval == pytest.approx((1.1, 1.1))
        assert summary.arms["relay_off"].interval.high - summary.arms["relay_off"].interval.low > 1.0


def test_mean_over_sets_weighs_sets_not_rounds() -> None:
    """Catches a pooled mean; the interval of a mean of two sets is narrower than that of one."""
    small, large = _arm((30, 10), (10, 10)), _arm((3000, 3000), (6000, 3000))
    by_set, mean = summarise({"small": {"relay_off": small}, "large": {"relay_off": large}})
    assert mean.arms["relay_off"].tau == (2.0 + 1.5) / 2
    assert mean.ratio is None
    spans = [s.arms["relay_off"].interval for s in (by_set["small"], by_set["large"], mean)]
    assert spans[2].high < (spans[0].high + spans[1].high) / 2 + 1e-9
    assert by_set == summarise({"small": {"relay_off": small}, "large": {"relay_off": large}})[0]  # same seed


def test_arms_with_other_prompts_are_refused() -> None:
    """Catches pairing answers to different prompts."""
    other = Acceptance((Outcome("q/0", 1, 1, None),), block_size=4)
    with pytest.raises(ValueError, match="different prompts"):
        tau_draws([_arm((1, 1)), other], torch.Generator())
