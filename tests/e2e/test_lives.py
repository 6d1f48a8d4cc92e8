"""Every life a request can have, on one real server under pressure: the soak, with each draft's rows checked.

The server runs pages of 16 tokens, chunks of 256 with decoding requests mixed in, and a KV pool that forces retraction.
The probe traces every iteration, and makes a host read in our decode path raise. `tests/support/lives.py` derives from
the life of each request alone how many rows every draft must relay.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from sglang_dflow.server import Server, ServerSpec, post, relay_state, set_relay
from sglang_dflow.soak.check import Expected, find_mismatches, is_checked, key, metric_total, server_problems
from sglang_dflow.soak.client import Answer, send
from sglang_dflow.soak.command import PRESSURE_ARGS, REFERENCE_ARGS, Outcome, corpus, reference_answers, run_bursts
from sglang_dflow.soak.workload import Burst, Request, make_workload
from tests.support.arms import Arm
from tests.support.lives import Life, Lives, read_lives, wait_until_idle

BLOCK = 8
# Continued by repetition, of which long runs are accepted.
REPETITIVE = (
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "yes no " * 12,
    "def f(x):\n    return x\n\n\n" * 4,
    "- a\n- b\n- c\n" * 6,
)
NUM_REQUESTS = int(os.environ.get("DFLOW_SOAK_REQUESTS", "300"))
TIMEOUT_S = 300.0


class Soaked(NamedTuple):
    """The server after the soak, still running; `directory` holds the probe's trace and switches, `seen` the soak's."""

    server: Server
    directory: Path
    expected: Expected
    bursts: list[Burst]
    outcome: Outcome
    problems: list[str]
    retractions: int
    seen: Lives
    text: list[int]

    def lives(self) -> Lives:
        return read_lives(self.directory / "lives", block_size=BLOCK)

    def ask(self, prompt: list[int], max_new_tokens: int, **more: Any) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        return post(self.server.url, "/generate", {"input_ids": prompt, "sampling_params": sampling, **more})

    def greedy(self) -> list[Request]:
        """Some whole greedy requests of the workload, whose answers are known."""
        every = [request for burst in self.bursts for request in burst.requests]
        return [request.whole() for request in every if request.is_greedy and "n" not in request.sampling][:12]


@pytest.fixture(scope="module")
def soaked(target: Path, drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Soaked]:
    directory = tmp_path_factory.mktemp("lives")
    text = corpus(target)
    bursts = make_workload(0, NUM_REQUESTS, text)
    plain = ServerSpec(model=str(target), dtype="float32", extra_args=REFERENCE_ARGS)
    with Server(plain, log_path=directory / "reference.log") as server:
        expected = reference_answers(server.url, bursts, timeout_s=TIMEOUT_S)
    probe = {"lives": str(directory / "lives"), "switches": str(directory), "pure": True}
    spec = ServerSpec(
        model=str(target),
        drafter=str(drafter),
        dtype="float32",
        extra_args=PRESSURE_ARGS,
        env=Arm(probe=probe).probe_env(),
    )
    with Server(spec, log_path=directory / "server.log") as server:
        outcome = run_bursts(server, bursts, expected, timeout_s=TIMEOUT_S, progress=lambda done: None)
        sampling = {"temperature": 0.0, "max_new_tokens": 96, "ignore_eos": True}
        post(server.url, "/generate", {"text": list(REPETITIVE), "sampling_params": sampling})
        problems = outcome.failures + server_problems(server.url)
        retractions = int(metric_total(server.url, "sglang:num_retracted_requests_total"))
        set_relay(server.url, True)  # the workload may have ended with it off
        seen = read_lives(directory / "lives", block_size=BLOCK)
        yield Soaked(server, directory, expected, bursts, outcome, problems, retractions, seen, text)


def test_soak_is_exact_and_leaves_a_healthy_server(soaked: Soaked) -> None:
    """No mismatch, hang or failure; retractions and aborts happened; nothing leaks, no row was NaN."""
    assert [str(mismatch) for mismatch in soaked.outcome.mismatches] == []
    assert soaked.problems == []
    assert len(soaked.outcome.answers) == NUM_REQUESTS
    assert sum(is_checked(*pair) for pair in soaked.outcome.answers) > NUM_REQUESTS / 2
    assert soaked.retractions > 0
    assert sum(answer.cut for _, answer in soaked.outcome.answers) > NUM_REQUESTS / 30
    assert {kind for _, answer in soaked.outcome.answers for kind in answer.finished_by} >= {"length", "stop", "token"}


def test_every_draft_relays_what_its_requests_life_allows(soaked: Soaked) -> None:
    """A leak between requests, a row that outlives its round, a lost row: in any life that the soak met.

    A rejection at the very last row is too rare here to be asked for: `test_worker.py::test_step_table` has it.
    """
    assert soaked.seen.wrong == []
    assert set(Life) - {Life.LAST_ROW_REJECTED} - set(soaked.seen.seen) == set(), soaked.seen.seen


def test_answers_end_inside_accepted_runs(soaked: Soaked) -> None:
    """By a stop string, a stop token and the token limit: the run's tail was committed and must not be answered."""
    rounds = soaked.seen.rounds
    cut_short = set()
    for _, answer in soaked.outcome.answers:
        steps = rounds.get(answer.rid, [])
        committed = 1 + sum(accept_len + 1 for _, accept_len, _ in steps)
        if len(answer.outputs) == 1 and not answer.cut and committed > len(answer.outputs[0]):
            cut_short.add(answer.finished_by[0])
    assert cut_short >= {"length", "stop", "token"}


def test_counters_are_the_traces(soaked: Soaked) -> None:
    """Prometheus, `/server_info` and a request's own hit rate, each against the probe's trace."""
    url = soaked.server.url
    answer = soaked.ask(soaked.text[:40], 24, rid="counted")
    rounds = soaked.lives().rounds["counted"]
    info = answer["meta_info"]
    steps = info["spec_verify_ct"]
    assert info["relayed_rows"] == sum(relayed for _, _, relayed in rounds[:steps])
    assert info["relay_hit_rate"] == pytest.approx(info["relayed_rows"] / (steps * (BLOCK - 1)))
    state = relay_state(url)
    for name in ("rounds", "relayed_rows", "eligible_rows"):
        assert metric_total(url, f"dflow:{name}_total") == state[name], name
    assert metric_total(url, "dflow:dropped_rows_total") == sum(state["dropped_rows"].values())
    assert "DFLOW relay, last" in soaked.server.log_text()


def test_radix_hits_accept_as_many_drafts_as_a_cold_run(soaked: Soaked) -> None:
    """A second request finds the first one's prompt in the cache, target and draft KV: same text, tau within 1 %."""
    url, prompts = soaked.server.url, [soaked.text[start : start + 300] for start in (0, 700, 1500)]
    requests.post(f"{url}/flush_cache", params={"timeout": 20}, timeout=60).raise_for_status()
    cold, warm = ([soaked.ask(prompt, 64) for prompt in prompts] for _ in range(2))
    assert [answer["output_ids"] for answer in warm] == [answer["output_ids"] for answer in cold]
    assert all(answer["meta_info"]["cached_tokens"] >= 288 for answer in warm)
    assert not any(answer["meta_info"]["cached_tokens"] for answer in cold)
    steps = [sum(answer["meta_info"]["spec_verify_ct"] for answer in answers) for answers in (cold, warm)]
    assert steps[1] == pytest.approx(steps[0], rel=0.01)


def test_session_continues_where_it_was(soaked: Soaked) -> None:
    """Two turns of a session answer as two whole prompts would."""
    url, first, second = soaked.server.url, soaked.text[200:240], soaked.text[600:620]
    session = post(url, "/open_session", {"capacity_of_str_len": 1000})
    begun = soaked.ask(first, 16, session_params={"id": session})
    went_on = soaked.ask(second, 16, session_params={"id": session, "rid": begun["meta_info"]["id"]})
    requests.post(f"{url}/close_session", json={"session_id": session}, timeout=60).raise_for_status()
    whole = soaked.ask([*first, *begun["output_ids"], *second], 16)
    assert went_on["output_ids"] == whole["output_ids"]
    assert went_on["meta_info"]["spec_verify_ct"] > 0


@pytest.mark.parametrize("end", ["finish", "abort"])
@pytest.mark.parametrize("invalidate", [True, False])
def test_planted_state_reaches_no_other_request(soaked: Soaked, end: str, invalidate: bool) -> None:
    """The next request drafts in the same slot, at the very position where the old one's states wait for a draft.

    With the invalidation taken away (a switch of the probe) the same steps must leak: else they would prove nothing.
    """
    name = f"planted-{end}-{invalidate}"
    if end == "finish":
        soaked.ask(soaked.text[100:140], 12, rid=name)
    else:
        sampling = {"temperature": 0.0, "max_new_tokens": 200, "ignore_eos": True}
        planted = Request(name, tuple(soaked.text[100:140]), sampling, stream=True, leave_after=3)
        assert send(soaked.server.url, planted, timeout_s=TIMEOUT_S, rid=name).cut
    wait_until_idle(soaked.server.url)
    before = soaked.lives()
    prefix_len, accept_len, _ = before.rounds[name][-1]
    position = prefix_len + accept_len + 1
    assert accept_len < BLOCK - 1, "the last block was accepted in full: nothing is planted, take another prompt"
    keep = soaked.directory / "keep"
    if not invalidate:
        keep.touch()
    try:
        # Another text: a radix hit must not stand in for the slot. Its first draft stands at its prompt's end.
        soaked.ask(soaked.text[1000 : 1000 + position], 4, rid=f"{name}-next")
    finally:
        keep.unlink(missing_ok=True)
    after = soaked.lives()
    assert after.slots[f"{name}-next"] == after.slots[name]
    first = after.rounds[f"{name}-next"][0]
    assert first[0] == position
    assert first[2] == (0 if invalidate else BLOCK - 1 - accept_len)


def test_rows_that_are_not_finite_are_refused(soaked: Soaked) -> None:
    """NaN in every stored state: counted, nothing relayed, the answers are the target's."""
    url, asked = soaked.server.url, soaked.greedy()
    before = relay_state(url)
    (soaked.directory / "nan").touch()
    try:
        answers = [send(url, request, timeout_s=TIMEOUT_S) for request in asked]
    finally:
        (soaked.directory / "nan").unlink()
    after = relay_state(url)
    assert find_mismatches(soaked.expected, zip(asked, answers)) == []
    assert after["dropped_rows"]["non_finite"] > before["dropped_rows"]["non_finite"]
    assert after["relayed_rows"] == before["relayed_rows"]


def test_clients_that_leave_free_everything(soaked: Soaked) -> None:
    """Twelve streams dropped after their first chunk: the next request is answered, and no KV slot stays in use."""
    url, known = soaked.server.url, soaked.greedy()[0]
    sampling = {"temperature": 0.0, "max_new_tokens": 300, "ignore_eos": True}
    for start in range(0, 480, 40):
        left = Request("left", tuple(soaked.text[start : start + 40]), sampling, stream=True, leave_after=1)
        assert send(url, left, timeout_s=TIMEOUT_S).cut
    answer: Answer = send(url, known, timeout_s=TIMEOUT_S)
    assert answer.outputs[0] == soaked.expected[key(known)]
    wait_until_idle(url)
    problems = [problem for problem in server_problems(url) if "not finite" not in problem]
    assert problems == []


def test_weight_update_in_flight(soaked: Soaked, target: Path) -> None:
    """States of the old weights are forgotten in the middle of a request; the weights are the same, so is the text.

    And so are the drafts: the files of an update from disk are the target's, and must not reach the drafter.
    """
    prompt, url = soaked.text[300:340], soaked.server.url
    alone = soaked.ask(prompt, 150)
    answers: list[dict[str, Any]] = []
    running = threading.Thread(target=lambda: answers.append(soaked.ask(prompt, 150, rid="updated")))
    running.start()
    while "updated" not in soaked.lives().rounds:
        time.sleep(0.1)
    # The host updates a server in use only while it is paused.
    requests.post(f"{url}/pause_generation", json={"mode": "in_place"}, timeout=60).raise_for_status()
    body = {"model_path": str(target), "flush_cache": False}
    assert post(url, "/update_weights_from_disk", body)["success"]
    requests.post(f"{url}/continue_generation", json={}, timeout=60).raise_for_status()
    running.join()
    assert answers[0]["output_ids"] == alone["output_ids"]
    zeros = [relayed for _, accept_len, relayed in soaked.lives().rounds["updated"]].count(0)
    assert zeros >= 2, "the first round, and the one behind the update"
    again = soaked.ask(prompt, 150)["meta_info"]["spec_verify_ct"]
    assert again == pytest.approx(alone["meta_info"]["spec_verify_ct"], rel=0.05)
