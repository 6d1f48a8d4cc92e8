"""sglang_dflow/soak: the workload is its seed, a difference is found, a failure shrinks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_dflow.soak import command
from sglang_dflow.soak.check import Mismatch, find_mismatches, is_checked, key, slope_per_1000
from sglang_dflow.soak.client import Answer
from sglang_dflow.soak.shrink import shrink
from sglang_dflow.soak.workload import MAX_PROMPT, Burst, Request, from_json, make_workload, to_json

CORPUS = list(range(3 * MAX_PROMPT))


def test_workload_is_decided_by_its_seed_and_survives_a_file() -> None:
    """A failing workload must be the same when it is run again."""
    workload = make_workload(7, 200, CORPUS)
    assert workload == make_workload(7, 200, CORPUS) != make_workload(8, 200, CORPUS)
    assert from_json(json.loads(json.dumps(to_json(workload)))) == workload
    with pytest.raises(ValueError, match="corpus has 10 tokens, expected at least 2000"):
        make_workload(0, 1, CORPUS[:10])


def test_workload_reaches_every_kind_of_request() -> None:
    """What CI runs: a kind that the generator lost would not be soaked any more."""
    bursts = make_workload(0, 300, CORPUS)
    requests = [request for burst in bursts for request in burst.requests]
    assert len({request.name for request in requests}) == len(requests) == 300
    lengths = [len(request.input_ids) for request in requests]
    assert min(lengths) <= 2 and max(lengths) > 1000 and max(lengths) <= MAX_PROMPT
    assert 150 < sum(request.is_greedy for request in requests) < 270
    for kind in ("stream", "logprobs", "leave_after", "abort_after_s"):
        assert any(getattr(request, kind) for request in requests), kind
    for parameter in ("stop", "stop_token_ids", "ignore_eos", "n"):
        assert any(parameter in request.sampling for request in requests), parameter
    assert any(burst.flush for burst in bursts)
    assert {burst.relay for burst in bursts} == {None, True, False}


def _request(**changes: object) -> Request:
    return dataclasses.replace(Request("0.0", (1, 2), {"temperature": 0.0, "max_new_tokens": 4}), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "answer", "wrong"),
    [
        (_request(), Answer(outputs=((5, 6, 7),)), 0),
        (_request(), Answer(outputs=((5, 6, 8),)), 1),
        (_request(), Answer(outputs=((5, 6),)), 1),
        (_request(), Answer(outputs=((5, 6),), cut=True), 0),
        (_request(), Answer(outputs=((5, 7),), cut=True), 1),
        (_request(sampling={"temperature": 0.0, "max_new_tokens": 4, "n": 2}), Answer(outputs=((5, 6, 7), (5, 6))), 1),
        (_request(sampling={"temperature": 1.0, "max_new_tokens": 4}), Answer(outputs=((9,),)), 0),
        (_request(), Answer(error="timeout"), 0),
    ],
)
def test_greedy_answers_are_compared(request_: Request, answer: Answer, wrong: int) -> None:
    """Whole answers exactly, cut ones as a beginning, each of `n`; sampled and failed ones not at all."""
    expected = {key(_request()): (5, 6, 7)}
    assert len(find_mismatches(expected, [(request_, answer)])) == wrong
    assert is_checked(request_, answer) == (request_.is_greedy and answer.error is None)


def test_the_reference_is_asked_once_and_in_one_piece() -> None:
    """And asking it does not change the request that is soaked."""
    sampling = {"temperature": 0.0, "max_new_tokens": 4, "n": 3, "stop": ["."]}
    request = _request(sampling=sampling, delay_s=1.0, stream=True, logprobs=True, leave_after=2)
    whole = request.whole()
    assert whole == Request("0.0", (1, 2), {"temperature": 0.0, "max_new_tokens": 4, "stop": ["."]})
    assert request.sampling["n"] == 3 and key(whole) == key(request)


@pytest.mark.parametrize("needed", [[3], [2, 11], [0, 7, 19]])
def test_shrinks_to_what_is_needed(needed: list[int]) -> None:
    """ddmin keeps exactly the items without which the failure is gone, in their order."""

    def fails(items: Sequence[int]) -> bool:
        return set(needed) <= set(items)

    assert shrink(range(20), fails, max_tries=500) == needed


def test_shrinking_gives_up_in_time() -> None:
    tried: list[int] = []

    def fails(items: Sequence[int]) -> bool:
        tried.append(len(items))
        return 3 in items and 17 in items

    small = shrink(range(40), fails, max_tries=5)
    assert len(tried) <= 5 and {3, 17} <= set(small) and len(small) < 40


def test_slope_ignores_the_warm_up() -> None:
    """MB per 1,000 requests, over the second half only."""
    samples = [(x, 500.0 - 100 / (x + 1) if x < 500 else 600 + 0.002 * x) for x in range(0, 1001, 100)]
    assert slope_per_1000(samples) == pytest.approx(2.0)
    assert slope_per_1000(samples[:2]) is None


class _FakeServer:
    """Stands for both servers of the command."""

    url, pid, log_path = "http://nowhere", 0, Path("server.log")

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def __enter__(self) -> _FakeServer:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers the second request of the third burst wrongly, and only if the first is there, too."""

    def run_bursts(server: Any, bursts: Sequence[Burst], *args: Any, **kwargs: Any) -> command.Outcome:
        requests = {request.name: request for burst in bursts for request in burst.requests}
        outcome = command.Outcome([(request, Answer(outputs=((1,),))) for request in requests.values()])
        outcome.memory = [(index, 5.0) for index in range(9)]
        outcome.anonymous = {"scheduler 7": [(index, 0.001 * index) for index in range(9)], "short 8": [(0, 1.0)]}
        if {"2.0", "2.1"} <= requests.keys():
            outcome.mismatches = [Mismatch(requests["2.1"], (1, 2), (1, 3))]
        return outcome

    state = {"tau": 1.5, "relay_hit_rate": 0.5}
    replaced: dict[str, Any] = {
        "Server": _FakeServer,
        "corpus": lambda model: CORPUS,
        "reference_answers": lambda *args, **kwargs: {},
        "run_bursts": run_bursts,
        "server_problems": lambda url: [],
        "metric_total": lambda url, name: 3.0,
        "relay_state": lambda url: state,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(command, name, value)


@pytest.mark.usefixtures("faulty")
def test_a_failing_soak_leaves_the_smallest_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status, last line, and a file with the two requests that are needed, which fails again when replayed."""
    common = ["--model", str(tmp_path), "--out", str(tmp_path)]
    assert command.main([*common, "--requests", "60", "--seed", "4"]) == 1
    out = capsys.readouterr().out
    assert "MISMATCH in request 2.1, from output token 1" in out
    report = json.loads(out.splitlines()[-1])
    assert (report["requests"], report["mismatches"], report["hangs"], report["retractions"]) == (60, 1, 0, 3)
    assert report["rss_slope_mb_per_1000"] == 0.0
    assert report["anonymous_slope_by_process"] == {"scheduler 7": 1.0}  # of a process that is gone: nothing
    left = from_json(json.loads((tmp_path / "soak-4.json").read_text()))
    assert [[request.name for request in burst.requests] for burst in left] == [["2.0", "2.1"]]
    assert command.main([*common, "--replay", str(tmp_path / "soak-4.json")]) == 1


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize(
    ("found", "words"),
    [
        (command.Outcome([(_request(), Answer(error="timeout"))]), "request 0.0: timeout"),
        (command.Outcome(stopped=True), "the server stopped answering after 0 requests: server.log"),
        (command.Outcome([(_request(), Answer(bad="odd"))]), "request 0.0: odd"),
        (
            command.Outcome([(_request(), Answer())] * 2000, memory=[(1000 * n, 9.0 * n) for n in range(5)]),
            "the server grows by 9.00 MB per 1,000 requests, expected at most 1.0",
        ),
    ],
)
def test_other_problems_fail_the_soak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: Any, words: str
) -> None:
    """A hang, a crash, a bad answer, a leak: told in words and in the exit status, with the last line all the same."""
    monkeypatch.setattr(command, "run_bursts", lambda *args, **kwargs: found)
    assert command.main(["--model", str(tmp_path), "--out", str(tmp_path), "--requests", "1"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert words in out
    assert json.loads(out[-1])["problems"] == 1


@pytest.mark.usefixtures("faulty")
def test_a_soak_without_a_mismatch_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--model", str(tmp_path), "--out", str(tmp_path), "--requests", "1"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["mismatches"] == 0
    assert not list(tmp_path.iterdir())
