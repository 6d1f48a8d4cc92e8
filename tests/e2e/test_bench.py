"""`sglang-dflow bench serving` on real servers, which also carry the timers of `bench cost`: two starts for both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_dflow.bench import cost, cost_probe, serving
from sglang_dflow.cpu import GRAPH_SWITCH
from tests.support.arms import POOL_ARGS


def test_sweep_and_cost(
    target: Path, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a client that miscounts a real server's stream, and timers that no longer meet the host's methods."""
    trace = tmp_path / "trace.jsonl"
    monkeypatch.setenv("PYTHONPATH", cost_probe.install(tmp_path))
    monkeypatch.setenv(cost_probe.VARIABLE, str(trace))
    monkeypatch.setenv(GRAPH_SWITCH, "off")  # as `bench cost` does
    argv = ["--target", str(target), "--drafter", str(drafter), "--arms", "baseline", "dflow", "--concurrency", "1,2"]
    argv += ["--requests", "3", "--repeats", "1", "--max-new-tokens", "24", "--server-args", " ".join(POOL_ARGS)]
    assert serving.main([*argv, "--out", str(tmp_path / "run")]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["outputs"]["equal"]
    points = {(point["arm"], point["concurrency"]): point for point in record["points"]}
    assert set(points) == {(arm, level) for arm in ("no speculation", "DFLOW") for level in (1, 2)}
    assert len({point["output_hash"] for point in points.values()}) == 1
    for (arm, _), point in points.items():
        assert 0 < point["ttft_ms"]["p50"]["median"] <= point["ttft_ms"]["p99"]["median"]
        assert 0 < point["output_tokens"] <= 72 and point["peak_ram_mb"]["median"] > 200
        if arm == "DFLOW":  # the same tokens in fewer rounds, by the host's own count
            assert 1 < point["tau"] <= 8 and len(point["by_depth"]) <= 7 and 0 < point["relay_hit_rate"] <= 1
            assert point["tau"] == pytest.approx(1 + sum(point["by_depth"]), rel=0.25)  # the prefill's tokens count too

    stack = cost.stack([json.loads(line) for line in trace.read_text().splitlines()], 1)
    parts = stack["parts_ms"]
    assert stack["rounds"] >= 5
    assert min(parts[part] for part in ("verify", "draft", "relay apply", "relay store", "draft KV", "accept")) > 0
    assert parts["verify"] > parts["draft"] > parts["relay apply"]
    assert parts["draft"] > parts["worker"]  # the draft's head was timed, by whichever method computes it here
    assert sum(parts.values()) == pytest.approx(stack["round_ms"]["mean"], rel=1e-3)
