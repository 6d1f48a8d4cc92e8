"""`torchrun -m sglang_dflow.training.trainer` with two processes: interrupted and resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from sglang_dflow.training.drafter import Drafter
from tests.support.tiny_training import make_workplace, write_recipe


def _train(recipe: Path, *options: str, processes: int) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*launcher, "-m", "sglang_dflow.training.trainer", str(recipe), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_processes_resume_exactly(tmp_path: Path) -> None:
    """Catches gradients that are not averaged over processes, rollouts that one process does not see, and a resume that
    goes on from another place: 3 steps and then the rest give the weights of one go."""
    workplace = make_workplace(tmp_path)
    straight, parts = (write_recipe(workplace, name, method="dflow") for name in ("straight", "parts"))
    _train(straight, processes=2)
    assert "resumed" not in _train(parts, "--stop-at", "3", processes=2)
    assert torch.load(workplace / "parts" / "checkpoint.pt", weights_only=True)["step"] == 3
    assert "resumed at step 3" in _train(parts, processes=2)
    weights = [Drafter.load(workplace / name / "last").state_dict() for name in ("straight", "parts")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
