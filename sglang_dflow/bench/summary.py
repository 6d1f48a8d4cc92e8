"""From measured requests to the sweep's numbers: points with their spread, and arms against each other.

Owns no measurement and no file. Every number of a point is computed per repeat, then told as median, lowest and
highest repeat; tau and acceptance by depth pool the repeats, since greedy repeats draft the same blocks.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sglang_dflow.bench.arms import BASELINE, DFLASH, DFLOW, RELAY_OFF
from sglang_dflow.bench.run_directory import Level, Part
from sglang_dflow.training.acceptance import Acceptance, Outcome, interval, tau_draws

COMPARISONS = ((DFLOW, DFLASH), (DFLOW, RELAY_OFF), (DFLOW, BASELINE), (DFLASH, BASELINE))

Spread = dict[str, float]
Record = dict[str, Any]


def spread(values: Sequence[float]) -> Spread:
    """Median, lowest and highest."""
    return {
        "median": round(statistics.median(values), 4),
        "lowest": round(min(values), 4),
        "highest": round(max(values), 4),
    }


def points(parts: Sequence[Part]) -> list[Record]:
    """One record per arm and concurrency, in the order of first appearance."""
    return [
        _point(arm, levels)
        for arm in dict.fromkeys(part.arm for part in parts)
        for levels in _by_concurrency([part for part in parts if part.arm == arm])
    ]


def _by_concurrency(parts: Sequence[Part]) -> list[list[Level]]:
    """Levels of one arm: concurrency -> repeats."""
    return [[part.level(level.concurrency) for part in parts] for level in parts[0].levels]


def _point(arm: str, levels: Sequence[Level]) -> Record:
    accepted = _acceptance(levels)
    eligible = sum(level.eligible_rows for level in levels)
    gpu = [level.gpu_mb for level in levels if level.gpu_mb is not None]
    return {
        "arm": arm,
        "concurrency": levels[0].concurrency,
        "repeats": len(levels),
        "requests": len(levels[0].load.requests),
        "output_tokens": sum(request.tokens for request in levels[0].load.requests),
        "tokens_per_s": spread([tokens_per_s(level) for level in levels]),
        "ttft_ms": _percentiles(levels, lambda level: [r.ttft_s for r in level.load.requests]),
        "tpot_ms": _percentiles(levels, lambda level: [r.tpot_s for r in level.load.requests if r.tpot_s is not None]),
        "tau": round(accepted.tau, 4) if accepted.rounds else None,
        "by_depth": [round(share, 4) for share in accepted.by_depth] if accepted.by_depth else None,
        "relay_hit_rate": round(sum(level.relayed_rows for level in levels) / eligible, 4) if eligible else None,
        "peak_ram_mb": spread([level.ram_mb for level in levels]),
        "peak_gpu_mb": spread(gpu) if gpu else None,
        "output_hash": output_hash([levels[0]]),
    }


def tokens_per_s(level: Level) -> float:
    """Output tokens of all requests over the time that they took together."""
    return sum(request.tokens for request in level.load.requests) / level.load.seconds


def output_hash(levels: Sequence[Level]) -> str:
    """Short hash of all output tokens, in the order of the levels and prompts."""
    outputs = [[request.output_ids for request in level.load.requests] for level in levels]
    return hashlib.sha256(json.dumps(outputs).encode()).hexdigest()[:12]


def _percentiles(levels: Sequence[Level], seconds: Callable[[Level], list[float]]) -> dict[str, Spread]:
    return {
        f"p{percent}": spread([1e3 * float(np.percentile(seconds(level), percent)) for level in levels])
        for percent in (50, 99)
    }


def _acceptance(levels: Sequence[Level]) -> Acceptance:
    """The repeats of one arm and concurrency together, one outcome a prompt."""
    outcomes = []
    for number, requests in enumerate(zip(*(level.load.requests for level in levels))):
        width = max(len(request.histogram) for request in requests)
        histogram = [sum(r.histogram[i] for r in requests if i < len(r.histogram)) for i in range(width)]
        outcomes.append(
            Outcome(
                id=str(number),
                tokens=sum(request.tokens for request in requests),
                rounds=sum(request.rounds for request in requests),
                histogram=tuple(histogram) if width else None,
            )
        )
    depth = max((len(outcome.histogram or ()) for outcome in outcomes), default=0)
    return Acceptance(tuple(outcomes), block_size=depth)


def comparisons(parts: Sequence[Part]) -> list[Record]:
    """Arms against each other at every concurrency, paired by repeat (throughput) and by prompt (tau)."""
    by_arm: dict[str, list[Part]] = {}
    for part in sorted(parts, key=lambda part: part.repeat):
        by_arm.setdefault(part.arm, []).append(part)
    return [
        _comparison(arm, reference, mine, theirs)
        for arm, reference in COMPARISONS
        if arm in by_arm and reference in by_arm
        for mine, theirs in zip(_by_concurrency(by_arm[arm]), _by_concurrency(by_arm[reference]))
    ]


def _comparison(arm: str, reference: str, mine: Sequence[Level], theirs: Sequence[Level]) -> Record:
    ratios = [tokens_per_s(a) / tokens_per_s(b) for a, b in zip(mine, theirs)]
    record: Record = {
        "arm": arm,
        "reference": reference,
        "concurrency": mine[0].concurrency,
        "throughput_ratio": spread(ratios),
    }
    accepted = [_acceptance(mine), _acceptance(theirs)]
    if all(one.rounds for one in accepted):
        draws = tau_draws(accepted, torch.Generator("cpu").manual_seed(0))
        low, high = interval(draws[0] / draws[1])
        ratio = accepted[0].tau / accepted[1].tau
        record |= {
            "tau_ratio": round(ratio, 4),
            "tau_ratio_interval": [round(low, 4), round(high, 4)],
            "throughput_over_tau": spread([one / ratio for one in ratios]),
            "realised_gain": realised_gain(ratios, ratio, (low, high)),
        }
    return record


def realised_gain(
    throughput_ratios: Sequence[float], tau_ratio: float, tau_interval: tuple[float, float]
) -> Spread | None:
    """Share of the tau gain that became throughput: (throughput ratio - 1) / (tau ratio - 1), over the repeats.

    None where the tau ratio's interval holds 1: there is no gain to realise, and the quotient would be noise.
    """
    low, high = tau_interval
    if low <= 1 <= high:
        return None
    return spread([(ratio - 1) / (tau_ratio - 1) for ratio in throughput_ratios])
