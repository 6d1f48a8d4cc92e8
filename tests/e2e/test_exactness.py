"""Lossless, on the real server: DFLOW commits what the target alone commits; the relay changes drafts only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_dflow.cpu import GRAPH_SWITCH
from sglang_dflow.server import Server, relay_state, relay_states, set_relay
from sglang_dflow.verify import Completion, generate_all, mean_tau
from tests.support.arms import Arm, ArmResult, Round, assert_equal_outputs, read_trace

RunArm = Callable[[str, Arm], ArmResult]

# Concurrency -> number of prompts. docs/measuring.md has the result of `sglang-dflow verify` with all 64 at each.
LEVELS = {1: 8, 8: 24, 32: 48}
MAX_NEW_TOKENS = 32


class Asked(NamedTuple):
    """Of the DFLOW server: the rounds of its outputs; then its answers at concurrency 8, with noise in its pool."""

    overlap_is_off: bool
    rounds: list[Round]
    noisy: list[Completion]


@pytest.fixture(scope="module")
def baseline(run_arm: RunArm) -> ArmResult:
    return run_arm("baseline", Arm(concurrency=LEVELS, max_new_tokens=MAX_NEW_TOKENS))


def _overlap_is_off(server: Server) -> bool:
    return bool(server.server_info()["disable_overlap_schedule"])


@pytest.fixture(scope="module")
def dflow(
    run_arm: RunArm, drafter: Path, prompts_ids: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> ArmResult:
    directory = tmp_path_factory.mktemp("trace")
    trace, noise = directory / "dflow", directory / "noise"

    def ask(server: Server) -> Asked:
        rounds = read_trace(trace)
        noise.touch()
        prompts = prompts_ids[: LEVELS[8]]
        noisy = generate_all(server.url, prompts, concurrency=8, max_new_tokens=MAX_NEW_TOKENS)
        return Asked(_overlap_is_off(server), rounds, noisy)

    probe = {"trace": str(trace), "noise": str(noise)}
    arm = Arm(drafter=drafter, concurrency=LEVELS, max_new_tokens=MAX_NEW_TOKENS, probe=probe, ask=ask)
    return run_arm("dflow", arm)


def test_greedy_outputs_equal_no_speculation(baseline: ArmResult, dflow: ArmResult) -> None:
    """Any leak of the relay into verification, between requests, or into committed state."""
    assert_equal_outputs(baseline, dflow)
    assert dflow.extra.overlap_is_off is False, "overlap scheduling is on by default"
    assert all(answer.verify_steps > 0 for answer in dflow.outputs[1] if answer.tokens > 1)


@pytest.fixture(scope="module")
def synchronous_eager(run_arm: RunArm, drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> ArmResult:
    """Overlap off, and the draft forward not replayed from a graph: neither may change anything."""
    arm = Arm(
        drafter=drafter,
        concurrency={1: 4, 8: 24},
        max_new_tokens=MAX_NEW_TOKENS,
        extra_args=("--disable-overlap-schedule",),
        env={GRAPH_SWITCH: "off"},
        probe={"trace": str(tmp_path_factory.mktemp("trace") / "eager")},
        ask=_overlap_is_off,
    )
    return run_arm("dflow-no-overlap-eager", arm)


def test_greedy_outputs_equal_without_overlap(baseline: ArmResult, synchronous_eager: ArmResult) -> None:
    """The synchronous scheduler carries draft inputs another way (filter/merge instead of the future map)."""
    assert synchronous_eager.extra is True
    assert_equal_outputs(baseline, synchronous_eager)


def test_replayed_drafts_equal_eager_ones(dflow: ArmResult, synchronous_eager: ArmResult) -> None:
    """Graph safety: every block that the eager server drafted, the graph server drafted too, with the same proposals.

    Batches of 1 to 8 requests, so padded buckets, and a relay pool that is rewritten between replays. The other way
    round does not hold: with overlap a finished request drafts once more.
    """
    assert "Captured the draft forward for 8 requests" in dflow.log
    assert "Captured the draft forward" not in synchronous_eager.log
    assert len(synchronous_eager.rounds) > 300
    assert not Counter(synchronous_eager.rounds) - Counter(dflow.extra.rounds)


def test_relay_is_used_and_accepts_more_than_nothing(dflow: ArmResult) -> None:
    """The exactness above would be empty if every draft were rejected: tau must be clearly above 1."""
    assert mean_tau(dflow.outputs[1]) > 1.3


def test_noise_in_the_pool_changes_drafts_not_output(baseline: ArmResult, dflow: ArmResult) -> None:
    """Negative control: if noise did not lower tau, the relay would not be read; if it changed ids, not lossless."""
    noisy = dflow.extra.noisy
    assert_equal_outputs(baseline, dflow._replace(outputs={8: noisy}))
    assert mean_tau(noisy) < 0.97 * mean_tau(dflow.outputs[8])


def _domino_state(server: Server) -> dict[str, Any]:
    """Relay counters, and what the server's log says of the head."""
    return relay_state(server.url) | {"rollout": "Domino rollout enabled" in server.log_text()}


def test_domino_outputs_equal_no_speculation(baseline: ArmResult, run_arm: RunArm, domino_drafter: Path) -> None:
    """Catches a Domino drafter that does not start here in float32, and drafts of its rollout that reach committed
    tokens."""
    prompts = {1: 6, 8: 12}
    arm = Arm(drafter=domino_drafter, concurrency=prompts, max_new_tokens=MAX_NEW_TOKENS, ask=_domino_state)
    found = run_arm("domino", arm)
    assert_equal_outputs(baseline, found)
    assert mean_tau(found.outputs[1]) > 1.1, "nothing was accepted: the comparison would be empty"
    assert found.extra["rollout"] and found.extra["relayed_rows"] > 0


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
    window, level, count = 8, 8, 24
    assert min(map(len, prompts_ids[:count])) > window
    arm = Arm(
        drafter=drafter,
        concurrency={level: count},
        max_new_tokens=MAX_NEW_TOKENS,
        extra_args=("--speculative-draft-window-size", str(window)),
        probe={"trace": str(tmp_path / "trace")},
        ask=lambda server: relay_state(server.url),
    )
    found = run_arm("window", arm)
    assert_equal_outputs(baseline, found)
    assert found.extra["relay_hit_rate"] > 0.3
    assert Counter(found.rounds) - Counter(dflow.extra.rounds), "the window changed no draft"


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
    assert_equal_outputs(baseline, found)
    counted, switched = found.extra
    assert len(counted) == 2 and all(rank["relayed_rows"] > 100 for rank in counted)
    assert [rank["relay"] for rank in switched] == ["off", "off"]
