"""The cost of a round: the nested timer, which rounds count, and the stack, worked out by hand."""

from __future__ import annotations

from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest

from sglang_dflow.bench import cost, cost_probe


def test_nested_timer_counts_every_second_once() -> None:
    times = iter([0, 1, 2, 5, 6, 7, 10])  # enter a, enter b, enter c, leave c, leave b, (a again:) ...
    timer = cost_probe.NestedTimer(lambda: float(next(times)))
    for part in ("worker", "draft", "relay apply"):
        timer.enter(part)
    assert timer.within("draft") and not timer.within("verify")
    assert timer.leave() == (2, 5)
    assert timer.leave() == (1, 6)
    assert timer.leave() == (0, 7)
    assert timer.seconds == {"relay apply": 3, "draft": 2, "worker": 2}
    assert sum(timer.seconds.values()) == 7 and not timer.within("worker")


def _call(start: float, end: float, *, requests: int = 2, decodes: bool = True, **parts: float) -> dict[str, Any]:
    return {"decodes": decodes, "requests": requests, "start": start, "end": end, "parts": parts}


def test_only_undisturbed_full_rounds_count() -> None:
    """A prefill, a finished request or a round at another concurrency in between would be counted as scheduler time."""
    trace = [
        _call(0, 3, verify=2, worker=1),
        _call(4, 7, verify=2, worker=1),  # its predecessor counts: 1 s of scheduler
        _call(9, 10, decodes=False),
        _call(11, 14, verify=2, worker=1),
        _call(14.5, 17, requests=1),
        _call(18, 20, requests=1),
    ]
    assert list(cost.rounds(trace, 2)) == [{"verify": 2, "worker": 1, "scheduler": 1}]
    assert [one["scheduler"] for one in cost.rounds(trace, 1)] == [1]


def test_stack() -> None:
    """Two rounds of 10 and 20 ms with 1 ms of relay each: shares 10 % and 5 %."""
    relay = {"relay apply": 0.0004, "relay store": 0.0006}
    trace = [
        _call(0.000, 0.008, verify=0.005, draft=0.002, **relay),
        _call(0.010, 0.028, verify=0.015, draft=0.002, **relay),
        _call(0.030, 0.031),
    ]
    found = cost.stack(trace, 2)
    assert found["rounds"] == 2
    assert found["parts_ms"]["verify"] == pytest.approx(10) and found["parts_ms"]["scheduler"] == pytest.approx(2)
    assert found["parts_ms"]["draft"] == pytest.approx(2) and found["parts_ms"]["accept"] == 0
    assert found["round_ms"]["mean"] == pytest.approx(15) == sum(found["parts_ms"].values())
    assert found["relay_share"]["median"] == pytest.approx(0.075)
    assert found["relay_share"]["p10"] == pytest.approx(0.055) and found["relay_share"]["p90"] == pytest.approx(0.095)
    with pytest.raises(RuntimeError, match="no round with 8 requests"):
        cost.stack(trace, 8)
    for one in trace:
        one["parts"].pop("draft", None)
    with pytest.raises(RuntimeError, match="'draft'"):  # a host whose method has another name
        cost.stack(trace, 2)


def test_the_host_finds_the_probe_by_path_alone(tmp_path: Path) -> None:
    """As an entry point whose module can be imported; with a wrong name the run would be uninstrumented."""
    assert str(tmp_path) in cost_probe.install(tmp_path)
    (info,) = tmp_path.glob("*.dist-info")
    (entry,) = PathDistribution(info).entry_points
    assert entry.group == "sglang.srt.plugins" and entry.load() is cost_probe.register
