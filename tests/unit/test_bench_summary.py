"""The sweep's numbers from made-up requests, worked out by hand."""

from __future__ import annotations

import pytest

from sglang_dflow.bench import summary
from sglang_dflow.bench.agreement import differing
from sglang_dflow.bench.run_directory import Part
from tests.unit.bench_toys import level, request, sweep


def test_a_point() -> None:
    """18 tokens in 1 s and in 2 s; 18 tokens a repeat over 10 rounds, the prefill's token included."""
    point = next(p for p in summary.points(sweep()) if p["arm"] == "DFLOW" and p["concurrency"] == 1)
    assert (point["repeats"], point["requests"], point["output_tokens"]) == (2, 2, 18)
    assert point["tokens_per_s"] == {"median": 13.5, "lowest": 9.0, "highest": 18.0}
    assert point["ttft_ms"]["p50"]["median"] == pytest.approx(100)
    assert point["tpot_ms"]["p99"]["highest"] == pytest.approx(100)  # (0.9 s - 0.1 s) / 8
    assert point["tau"] == 1.8
    assert point["by_depth"] == [0.8]
    assert point["relay_hit_rate"] == 0.75
    assert point["peak_ram_mb"]["median"] == 100 and point["peak_gpu_mb"] is None
    plain = summary.points(sweep())[0]
    assert plain["tau"] is None and plain["by_depth"] is None and plain["relay_hit_rate"] is None


def test_percentiles_are_those_of_one_repeat() -> None:
    """p99 of all repeats together would let a slow repeat decide it alone; the spread would then hide it."""
    slow, fast = request(), request()
    object.__setattr__(slow, "ttft_s", 0.5)
    parts = [Part("A", 0, (level([slow, slow], 1.0),)), Part("A", 1, (level([fast, fast], 1.0),))]
    ttft = summary.points(parts)[0]["ttft_ms"]["p99"]
    assert ttft == {"median": pytest.approx(300), "lowest": pytest.approx(100), "highest": pytest.approx(500)}


def test_comparison_is_paired_by_repeat_and_prompt() -> None:
    """Repeat 1 is twice as slow in both arms: the ratio does not see it. All prompts alike: no spread of tau."""
    found = {(c["arm"], c["reference"], c["concurrency"]): c for c in summary.comparisons(sweep())}
    assert set(found) == {
        (arm, reference, c)
        for arm, reference in (("DFLOW", "DFLASH"), ("DFLOW", "no speculation"), ("DFLASH", "no speculation"))
        for c in (1, 4)
    }
    one = found["DFLOW", "DFLASH", 4]
    assert one["throughput_ratio"] == {"median": 1.2, "lowest": 1.2, "highest": 1.2}
    assert one["tau_ratio"] == 1.2 and one["tau_ratio_interval"] == [1.2, 1.2]
    assert one["throughput_over_tau"]["median"] == 1.0
    assert one["realised_gain"]["median"] == 1.0
    assert "tau_ratio" not in found["DFLOW", "no speculation", 1]


def test_repeats_are_paired_by_number_not_by_order() -> None:
    """Rotation starts the arms in another order in every repeat, and a resumed run appends late."""
    parts = sweep()
    shuffled = [*parts[:3], *reversed(parts[3:])]
    assert summary.comparisons(shuffled) == summary.comparisons(parts)
    late = [parts[5], *parts[:5]]
    assert sorted(map(str, summary.comparisons(late))) == sorted(map(str, summary.comparisons(parts)))


def test_realised_gain() -> None:
    """tau +10 %, throughput +5 % and +10 %: half and all of it; undefined where tau's interval holds 1."""
    gain = summary.realised_gain([1.05, 1.10], 1.10, (1.06, 1.14))
    assert gain == {"median": pytest.approx(0.75), "lowest": pytest.approx(0.5), "highest": pytest.approx(1.0)}
    assert summary.realised_gain([1.05], 1.001, (0.99, 1.01)) is None
    assert summary.realised_gain([0.9], 0.9, (0.85, 0.95))["median"] == pytest.approx(1.0)  # type: ignore[index]


def test_hash_sees_tokens_and_order() -> None:
    a, b = request(first=1), request(first=2)
    hashes = {summary.output_hash([level(requests, 1.0)]) for requests in ([a, b], [b, a], [a, a])}
    assert len(hashes) == 3
    assert summary.output_hash([level([a, b], 1.0)]) == summary.output_hash([level([a, b], 7.0)])


def test_differing_answers_are_found_once() -> None:
    """In any repeat and at any concurrency, against the first part; the same pair again is not another."""
    parts = sweep()
    assert differing(parts) == []
    wrong = [request(first=7), request()]
    parts[4] = Part("DFLASH", 1, (level(wrong, 1.0, 1), level(wrong, 1.0, 4)))
    (pair,) = differing(parts)
    assert (pair.prompt, pair.expected[0], pair.found[0]) == (0, 0, 7)
    assert pair.where == "DFLASH, repeat 1, concurrency 1"
