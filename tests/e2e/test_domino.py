"""A Domino drafter with a relay, on the real server of the CPU platform: starts in float32, drafts, and is lossless."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflow.server import Server, relay_state
from sglang_dflow.training.drafter import Drafter
from sglang_dflow.verify import mean_tau
from tests.e2e.test_exactness import LEVELS
from tests.support.arms import Arm, ArmResult

PROMPTS = {1: 6, 8: 12}


@pytest.fixture(scope="module")
def domino_drafter(drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drafter of the package with a random Domino head: quiet enough to be accepted, loud enough to be heard."""
    path = tmp_path_factory.mktemp("domino") / "drafter"
    plain = Drafter.load(drafter)
    torch.manual_seed(0)
    made = Drafter(dataclasses.replace(plain.config, projector_type="domino", gru_hidden_dim=64, emb_dim=48))
    missing, unexpected = made.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected and all(name.startswith("domino.") for name in missing)
    assert made.domino is not None
    torch.nn.init.normal_(made.domino.embed_proj[2].weight, std=0.5)
    made.save(path, torch.float32)
    return path


def _state(server: Server) -> dict[str, Any]:
    """Relay counters, and what the server's log says of the head."""
    return relay_state(server.url) | {"rollout": "Domino rollout enabled" in server.log_text()}


def test_greedy_outputs_equal_no_speculation(run_arm: Callable[[str, Arm], ArmResult], domino_drafter: Path) -> None:
    """Catches a Domino drafter that does not start here, and drafts of its rollout that reach committed tokens."""
    baseline = run_arm("baseline", Arm(concurrency=LEVELS))
    found = run_arm("domino", Arm(drafter=domino_drafter, concurrency=PROMPTS, ask=_state))
    for level, answers in found.outputs.items():
        assert [a.output_ids for a in answers] == [b.output_ids for b in baseline.outputs[level][: len(answers)]]
    assert mean_tau(found.outputs[1]) > 1.1, "nothing was accepted: the comparison would be empty"
    assert found.extra["rollout"] and found.extra["relayed_rows"] > 0
