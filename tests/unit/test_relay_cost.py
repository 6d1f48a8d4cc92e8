"""benchmarks/relay_cost.py and relay_toggle.py: the arithmetic of the figures, and which side serves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import relay_cost
from benchmarks.relay_cost import Pair, Round, pair_of, read_rounds, summary
from benchmarks.relay_toggle import Toggle


def test_a_pair_is_the_mean_round_of_either_side() -> None:
    rounds = [Round(1, True, 0.011), Round(1, True, 0.013), Round(2, False, 0.010)]
    assert pair_of(rounds) == pytest.approx(Pair(10.0, 12.0))


def test_one_side_alone_is_no_measurement() -> None:
    """Catches a plugin that was not loaded, or did not switch."""
    with pytest.raises(RuntimeError, match="expected both"):
        pair_of([Round(1, True, 0.01), Round(2, True, 0.01)])


def test_the_ratio_is_the_median_of_pairs() -> None:
    """Drift moves both sides of a pair: the ratio of two medians would mix pairs."""
    figures = summary([Pair(10, 11), Pair(20, 21), Pair(100, 150)])
    assert (figures["dflash_round_ms"], figures["dflow_round_ms"], figures["ratio"]) == (20, 21, 1.1)
    assert figures["spread"] == [1.05, 1.5]


class _Mode:
    def __init__(self, prefills: bool) -> None:
        self.prefills = prefills

    def is_extend(self) -> bool:
        return self.prefills


def test_requests_take_turns_with_the_relay(tmp_path: Path) -> None:
    """With, without, with; the first round behind a prefill has no beginning and is not written."""
    runner = SimpleNamespace(prefill_cuda_graph_runner=None)
    worker: Any = SimpleNamespace(_pool="pool", draft_model=SimpleNamespace(_pool="pool"), draft_model_runner=runner)
    toggle, pools = Toggle(tmp_path / "trace"), []
    for _ in range(3):
        for prefills in (True, False, False, False):
            batch = SimpleNamespace(forward_mode=_Mode(prefills), is_extend_in_batch=False)
            toggle.around(lambda *_: pools.append((worker._pool, worker.draft_model._pool)), worker, batch)
    assert pools == [("pool", "pool")] * 4 + [(None, None)] * 4 + [("pool", "pool")] * 4
    assert [(one.request, one.relay) for one in read_rounds(tmp_path / "trace")] == [
        *[(1, True)] * 2,
        *[(2, False)] * 2,
        *[(3, True)] * 2,
    ]


def test_a_machine_with_cuda_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The host's own draft graph would go on relaying, and both sides would cost the same."""
    monkeypatch.setattr(relay_cost, "has_cuda", lambda: True)
    assert relay_cost.main([]) == 1
    assert "CPU platform" in capsys.readouterr().err
