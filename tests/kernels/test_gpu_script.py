"""benchmarks/gpu/run_all.sh: known to run up to the device calls, and without SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_dry_run(tmp_path: Path) -> None:
    """The GPU machine has no sglang: here it is one that cannot be imported. The last line is the result."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").write_text("raise ImportError('there is no sglang on the GPU machine')")
    environment = os.environ | {
        "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path), "OUT": str(tmp_path), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    run = subprocess.run(
        [ROOT / "benchmarks/gpu/run_all.sh", "--dry-run"], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["problems"] == []
    assert result["parity"]["torch.float32"]["kernels"] <= 1e-5
    assert {row["width"] for row in result["share"]} == {row["width"] for row in result["timings"]["rows"]}
    assert (tmp_path / "relay_gpu.txt").read_text() == run.stdout


def test_refuses_a_machine_without_a_gpu() -> None:
    """Not a silent run of CPU timings."""
    command = [sys.executable, "-m", "benchmarks.gpu.run_all"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 1
    assert "no CUDA device here" in run.stderr
