"""benchmarks/relay_cost.py: the arithmetic of its figures, and a measured pair of servers replaced by stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import relay_cost
from benchmarks.relay_cost import Pair, measure, round_ms, summary
from sglang_dflow.bench.arms import DFLASH, DFLOW
from sglang_dflow.bench.client import Request


def test_a_round_is_decode_time_over_verify_steps() -> None:
    """The first token is the prefill's: its time is not a round's. Long answers weigh more than short ones."""
    requests = [Request([1, 2, 3], 0.5, 1.5, rounds=2), Request([1], 0.2, 0.3, rounds=9)]
    assert round_ms(requests) == pytest.approx(1e3 * 1.1 / 11)


def test_the_ratio_is_the_median_of_pairs() -> None:
    """Drift moves both arms of a pair: the ratio of two medians would mix pairs."""
    figures = summary([Pair(10, 11), Pair(20, 21), Pair(100, 150)])
    assert (figures["dflash_round_ms"], figures["dflow_round_ms"], figures["ratio"]) == (20, 21, 1.1)
    assert figures["spread"] == [1.05, 1.5]


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, list[int]]], list[str]]:
    """Replace the servers: which arm answers with what. Returns the order in which they were asked."""

    def prepare(outputs: dict[str, list[int]]) -> list[str]:
        asked: list[str] = []

        def answer(server: Any, *_: Any) -> list[Request]:
            asked.append(server)
            # Every answer takes a millisecond longer than the one before, whichever arm gives it: a drift.
            return [Request(outputs[server], 0.0, 0.001 * len(asked) + (server == DFLOW), rounds=1)]

        monkeypatch.setattr(relay_cost, "_answer", answer)
        return asked

    return prepare


SERVERS: Any = {DFLASH: DFLASH, DFLOW: DFLOW}


def test_drift_cancels_within_a_pair(answered: Any) -> None:
    """Behind one warm-up each: first, second, second, first."""
    order = answered({DFLASH: [1], DFLOW: [1]})
    pair = measure(SERVERS, [[1]], max_new_tokens=1)
    assert order == [DFLASH, DFLOW, DFLASH, DFLOW, DFLOW, DFLASH]
    assert pair.dflow_ms - pair.dflash_ms == pytest.approx(1000)


def test_arms_that_disagree_are_no_measurement(answered: Any) -> None:
    answered({DFLASH: [1], DFLOW: [2]})
    with pytest.raises(RuntimeError, match="outputs differ"):
        measure(SERVERS, [[1]], max_new_tokens=1)
