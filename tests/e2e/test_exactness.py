"""Lossless, on the real server: DFLOW commits what the target alone commits; the relay changes drafts only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_dflow.cpu import GRAPH_SWITCH
from sglang_dflow.server import Server, relay_state, relay_states, set_relay
from sglang_dflow.serving.settings import RelaySettings
from sglang_dflow.verify import mean_tau
from tests.support.arms import Arm, ArmResult

RunArm = Callable[[str, Arm], ArmResult]

# Concurrency -> number of prompts. docs/measuring.md has the result of `sglang-dflow verify` with all 64 at each.
LEVELS = {1: 8, 8: 24, 32: 48}
TRACED = {1: 8}


@pytest.fixture(scope="module")
def baseline(run_arm: RunArm) -> ArmResult:
    return run_arm("baseline", Arm(concurrency=LEVELS))


def _overlap_is_off(server: Server) -> bool:
    return bool(server.server_info()["disable_overlap_schedule"])


@pytest.fixture(scope="module")
def dflow(run_arm: RunArm, drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> ArmResult:
    trace = tmp_path_factory.mktemp("trace") / "dflow"
    arm = Arm(drafter=drafter, concurrency=LEVELS, probe={"trace": str(trace)}, ask=_overlap_is_off)
    return run_arm("dflow", arm)


@pytest.fixture(scope="module")
def dflash(run_arm: RunArm, dflash_drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> ArmResult:
    trace = tmp_path_factory.mktemp("trace") / "dflash"
    arm = Arm(drafter=dflash_drafter, algorithm="DFLASH", concurrency=TRACED, probe={"trace": str(trace)})
    return run_arm("dflash", arm)


def _assert_equal_outputs(expected: ArmResult, found: ArmResult) -> None:
    for level, answers in found.outputs.items():
        reference = expected.outputs[level]
        differing = [i for i, (a, b) in enumerate(zip(reference, answers)) if a.output_ids != b.output_ids]
        assert differing == [], f"prompts that differ at concurrency {level}"


def test_greedy_outputs_equal_no_speculation(baseline: ArmResult, dflow: ArmResult) -> None:
    """Any leak of the relay into verification, between requests, or into committed state."""
    _assert_equal_outputs(baseline, dflow)
    assert dflow.extra is False, "overlap scheduling is on by default"
    assert all(answer.verify_steps > 0 for answer in dflow.outputs[1] if answer.tokens > 1)


@pytest.fixture(scope="module")
def synchronous_eager(run_arm: RunArm, drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> ArmResult:
    """Overlap off, and the draft forward not replayed from a graph: neither may change anything."""
    arm = Arm(
        drafter=drafter,
        concurrency={1: 4, 8: 24},
        extra_args=("--disable-overlap-schedule",),
        env={GRAPH_SWITCH: "off"},
        probe={"trace": str(tmp_path_factory.mktemp("trace") / "eager")},
        ask=_overlap_is_off,
    )
    return run_arm("dflow-no-overlap-eager", arm)


def test_greedy_outputs_equal_without_overlap(baseline: ArmResult, synchronous_eager: ArmResult) -> None:
    """The synchronous scheduler carries draft inputs another way (filter/merge instead of the future map)."""
    found = synchronous_eager
    assert found.extra is True
    for level, answers in found.outputs.items():
        assert [a.output_ids for a in answers] == [b.output_ids for b in baseline.outputs[level][: len(answers)]]


def test_replayed_drafts_equal_eager_ones(dflow: ArmResult, synchronous_eager: ArmResult) -> None:
    """Graph safety: every block that the eager server drafted, the graph server drafted too, with the same proposals.

    Batches of 1 to 8 requests, so padded buckets, and a relay pool that is rewritten between replays. The other way
    round does not hold: with overlap a finished request drafts once more.
    """
    assert "Captured the draft forward for 8 requests" in dflow.log
    assert "Captured the draft forward" not in synchronous_eager.log
    assert len(synchronous_eager.rounds) > 300
    assert not Counter(synchronous_eager.rounds) - Counter(dflow.rounds)


def test_relay_is_used_and_accepts_more_than_nothing(dflow: ArmResult) -> None:
    """The exactness above would be empty if every draft were rejected: tau must be clearly above 1."""
    assert mean_tau(dflow.outputs[1]) > 1.3


def test_relay_off_drafts_exactly_as_dflash(run_arm: RunArm, dflash: ArmResult, drafter: Path, tmp_path: Path) -> None:
    """I5: proposals and accepted lengths of every round equal the host's DFLASH on the same weights."""
    arm = Arm(
        drafter=drafter,
        concurrency=TRACED,
        env={RelaySettings.VARIABLE: "off"},
        probe={"trace": str(tmp_path / "trace")},
    )
    found = run_arm("relay-off", arm)
    assert len(dflash.rounds) > 100
    assert found.rounds == dflash.rounds
    _assert_equal_outputs(dflash, found)


def test_zero_relay_drafts_exactly_as_dflash(
    run_arm: RunArm, dflash: ArmResult, zero_drafter: Path, tmp_path: Path
) -> None:
    """A converted DFlash drafter, relay on and writing: adds exact zeros, so nothing may change."""
    arm = Arm(drafter=zero_drafter, concurrency=TRACED, probe={"trace": str(tmp_path / "trace")})
    found = run_arm("zero-relay", arm)
    assert found.rounds == dflash.rounds
    _assert_equal_outputs(dflash, found)


def test_noise_in_the_pool_changes_drafts_not_output(
    run_arm: RunArm, baseline: ArmResult, dflow: ArmResult, drafter: Path, tmp_path: Path
) -> None:
    """Negative control: if noise did not lower tau, the relay would not be read; if it changed ids, not lossless."""
    arm = Arm(
        drafter=drafter,
        concurrency={8: 24},
        probe={"noise": True, "trace": str(tmp_path / "trace")},
    )
    found = run_arm("noise", arm)
    for level, answers in found.outputs.items():
        assert [a.output_ids for a in answers] == [b.output_ids for b in baseline.outputs[level][: len(answers)]]
    assert mean_tau(found.outputs[8]) < 0.97 * mean_tau(dflow.outputs[8])


def test_draft_window(
    run_arm: RunArm,
    baseline: ArmResult,
    dflow: ArmResult,
    drafter: Path,
    prompts_ids: list[list[int]],
    tmp_path: Path,
) -> None:
    """The drafter's window over a private slot table, whose lengths are not positions: the relay goes by the latter.

    Every prompt is longer than the window; drafts that differ show that it was honoured.
    """
    window, level, count = 16, 8, 24
    assert min(map(len, prompts_ids[:count])) > window
    arm = Arm(
        drafter=drafter,
        concurrency={level: count},
        extra_args=("--speculative-draft-window-size", str(window)),
        probe={"trace": str(tmp_path / "trace")},
        ask=lambda server: relay_state(server.url),
    )
    found = run_arm("window", arm)
    expected = baseline.outputs[level]
    assert [a.output_ids for a in found.outputs[level]] == [b.output_ids for b in expected[:count]]
    assert found.extra["relay_hit_rate"] > 0.3
    assert Counter(found.rounds) - Counter(dflow.rounds), "the window changed no draft"


def _both_ranks(server: Server) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every rank's relay after the answers, and after the switch was turned off."""
    counted = relay_states(server.url)
    set_relay(server.url, False)
    return counted, relay_states(server.url)


def test_data_parallel(run_arm: RunArm, baseline: ArmResult, drafter: Path) -> None:
    """Two whole replicas, a relay each: both answer, count and obey the switch."""
    level, count = 8, 16
    arm = Arm(
        drafter=drafter,
        concurrency={level: count},
        extra_args=("--dp-size", "2"),
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
        ask=_both_ranks,
    )
    found = run_arm("data-parallel", arm)
    expected = baseline.outputs[level]
    assert [a.output_ids for a in found.outputs[level]] == [b.output_ids for b in expected[:count]]
    counted, switched = found.extra
    assert len(counted) == 2 and all(rank["relayed_rows"] > 100 for rank in counted)
    assert [rank["relay"] for rank in switched] == ["off", "off"]
