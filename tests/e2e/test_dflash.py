"""Without what it adds, DFLOW is the host's DFLASH: the same proposals and accepted lengths, on the real server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_dflow.serving.settings import RelaySettings
from tests.support.arms import Arm, ArmResult, assert_equal_outputs

RunArm = Callable[[str, Arm], ArmResult]

PROMPTS = {1: 8}


@pytest.fixture(scope="module")
def dflash(run_arm: RunArm, dflash_drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> ArmResult:
    trace = tmp_path_factory.mktemp("trace") / "dflash"
    arm = Arm(drafter=dflash_drafter, algorithm="DFLASH", concurrency=PROMPTS, probe={"trace": str(trace)})
    return run_arm("dflash", arm)


def test_relay_off_drafts_exactly_as_dflash(run_arm: RunArm, dflash: ArmResult, drafter: Path, tmp_path: Path) -> None:
    """I5: proposals and accepted lengths of every round equal the host's DFLASH on the same weights."""
    arm = Arm(
        drafter=drafter,
        concurrency=PROMPTS,
        env={RelaySettings.VARIABLE: "off"},
        probe={"trace": str(tmp_path / "trace")},
    )
    found = run_arm("relay-off", arm)
    assert len(dflash.rounds) > 100
    assert found.rounds == dflash.rounds
    assert_equal_outputs(dflash, found)


def test_zero_relay_drafts_exactly_as_dflash(
    run_arm: RunArm, dflash: ArmResult, zero_drafter: Path, tmp_path: Path
) -> None:
    """A converted DFlash drafter, relay on and writing: adds exact zeros, so nothing may change."""
    arm = Arm(drafter=zero_drafter, concurrency=PROMPTS, probe={"trace": str(tmp_path / "trace")})
    found = run_arm("zero-relay", arm)
    assert found.rounds == dflash.rounds
    assert_equal_outputs(dflash, found)
