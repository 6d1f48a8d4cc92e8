"""`sglang-dflow acceptance`: prompt sets, the table and JSON line, and the side that talks to a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sglang_dflow.prompts import Prompt
from sglang_dflow.training import evaluate, prompt_sets
from sglang_dflow.training.acceptance import Acceptance, Outcome
from sglang_dflow.training.served import ServedDrafter


def _prompt_file(path: Path, count: int) -> str:
    path.write_text("".join(json.dumps({"id": f"{path.stem}/{i}", "turns": ["Hi"]}) + "\n" for i in range(count)))
    return str(path)


# --- the command -----------------------------------------------------------------------------------------


class _FakeArms:
    """Measurements by formula: tau 2 without the relay, 2.5 with it; set "b" has twice the prompts."""

    has_relay = True

    def __init__(self, args: Any) -> None:
        self.args = args

    def measure(self, name: str, prompts: list[Prompt], relay: bool) -> Acceptance:
        tokens, histogram = (25, (4, 3, 2, 1)) if relay else (20, (6, 2, 2))
        outcomes = tuple(Outcome(prompt.id, tokens, 10, histogram) for prompt in prompts)
        return Acceptance(outcomes, 4, 12 * len(prompts) * relay, 30 * len(prompts))

    def describe(self) -> dict[str, Any]:
        return {"mode": "fake"}

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.fixture
def fake_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "InProcess", _FakeArms)


def test_table_and_json_line(fake_arms: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches arms swapped, limits ignored, columns of another arm, and a last line that is not the record."""
    files = [_prompt_file(tmp_path / "a.jsonl", 9), _prompt_file(tmp_path / "b.jsonl", 3)]
    argv = ["--target", "T", "--drafter", "D", "--limit", "4", "--temperature", "1", "--prompts", *files]
    assert evaluate.main(argv) == 0
    out, err = capsys.readouterr()
    lines = out.strip().splitlines()
    record = json.loads(lines[-1])
    assert lines[1].split()[:7] == ["a", "off", "1", "2.000", "2.000..2.000", "4", "40"]
    assert lines[1].split()[7:] == ["-", "0.40", "0.20", "0.00"]
    assert lines[2].split()[:9] == ["a", "on", "1", "2.500", "2.500..2.500", "4", "40", "0.40", "0.60"]
    assert lines[5].split()[:7] == ["mean", "off", "1", "2.000", "2.000..2.000", "7", "70"]
    assert "mean         relay on / off: 1.2500" in out
    assert record["sets"]["a"]["relay_on"]["hit_rate"] == 0.4
    assert record["sets"]["b"]["relay_off"] == {
        "tau": 2.0, "interval": [2.0, 2.0], "n": 3, "rounds": 30, "tokens": 60, "hit_rate": 0.0,
        "by_depth": [0.4, 0.2, 0.0],
    }  # fmt: skip
    assert (record["mean"]["ratio"], record["mean"]["ratio_interval"]) == (1.25, [1.25, 1.25])
    assert record["command"].startswith("sglang-dflow acceptance --target T --drafter D")
    assert {"torch", "sglang-dflow"} <= set(record["versions"])
    assert "a relay_on tau 2.500" in err  # progress goes there


def test_arms_are_those_asked_for(
    fake_arms: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--relay on` of a drafter without one is an error, `both` measures what there is."""
    argv = ["--target", "T", "--drafter", "D", "--prompts", _prompt_file(tmp_path / "a.jsonl", 2)]
    assert evaluate.main([*argv, "--relay", "on"]) == 0
    assert list(json.loads(capsys.readouterr().out.splitlines()[-1])["mean"]) == ["relay_on"]
    monkeypatch.setattr(_FakeArms, "has_relay", False)
    assert evaluate.main(argv) == 0
    assert list(json.loads(capsys.readouterr().out.splitlines()[-1])["mean"]) == ["relay_off"]
    assert evaluate.main([*argv, "--relay", "on"]) == 1
    assert "this drafter has no relay" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [[], ["--drafter", "D"], ["--drafter", "D", "--target", "T", "--server", "http://x"]], ids=str
)
def test_ambiguous_arguments_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        evaluate.main([*argv, "--prompts", "x"])
    assert "either --target and --drafter, or --server" in capsys.readouterr().err


# --- prompt sets -----------------------------------------------------------------------------------------


def test_file_wins_and_unknown_names_are_refused(tmp_path: Path) -> None:
    name, prompts = prompt_sets.load_prompts(_prompt_file(tmp_path / "gsm8k.jsonl", 5), 3)
    assert (name, [prompt.id for prompt in prompts]) == ("gsm8k", ["gsm8k/0", "gsm8k/1", "gsm8k/2"])
    with pytest.raises(ValueError, match="neither a file .* nor one of the public sets .*gsm8k"):
        prompt_sets.load_prompts("gsm9k", 3)


def test_public_set_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a changed wording, the order of the set instead of a shuffle, and a limit that is not kept."""
    import datasets

    rows = [{"question": f"How many are {i}?", "answer": "x"} for i in range(50)]
    asked: list[Any] = []

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        asked.append((args, kwargs))
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    name, prompts = prompt_sets.load_prompts("gsm8k", 8)
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]
    numbers = [int(prompt.id.removeprefix("gsm8k/")) for prompt in prompts]
    assert name == "gsm8k" and len(set(numbers)) == 8 and numbers != list(range(8))
    for number, prompt in zip(numbers, prompts):
        assert prompt.text.startswith(f"How many are {number}?\nPlease reason step by step, and put")


def test_unreachable_hub_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match="hub did not give HuggingFaceH4/MATH-500 .no route.. Give a prompt file"):
        prompt_sets.load_prompts("math500", 8)


# --- a running server ------------------------------------------------------------------------------------


class _Host(BaseHTTPRequestHandler):
    """Speaks the few endpoints of the host: with the relay on it needs 2 rounds for 6 tokens, else 3."""

    state: dict[str, Any]

    def _send(self, answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        state = self.state
        internal = [{"dflow": dict(state["dflow"])}] if state["dflow"] else [{}]
        self._send(
            {
                "speculative_algorithm": state["algorithm"],
                "speculative_num_draft_tokens": 4,
                "internal_states": internal,
            }
        )

    def do_POST(self) -> None:
        body, state = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.state
        if self.path == "/set_internal_state":
            state["switched"].append(body["server_args"]["dflow_relay"])
            state["dflow"]["relay"] = "on" if body["server_args"]["dflow_relay"] else "off"
            self._send([True])
            return
        on = bool(state["dflow"]) and state["dflow"]["relay"] == "on"
        state["bodies"].append(body)
        if state["dflow"]:
            state["dflow"]["eligible_rows"] += 6 if on else 9
            state["dflow"]["relayed_rows"] += 3 if on else 0
        info: dict[str, Any] = {"completion_tokens": 6, "spec_verify_ct": 2 if on else 3}
        info["spec_correct_drafts_histogram"] = [0, 1, 1] if on else [1, 2]
        if body["input_ids"] == [9]:
            info = {"completion_tokens": 1}  # ended with the prefill's token
        self._send({"output_ids": [], "meta_info": info})

    def log_message(self, *args: Any) -> None:
        return


@pytest.fixture
def host() -> Iterator[tuple[str, dict[str, Any]]]:
    state: dict[str, Any] = {
        "algorithm": "DFLOW", "switched": [], "bodies": [],
        "dflow": {"relay": "on", "pool_bytes": 1, "relayed_rows": 100, "eligible_rows": 1000},
    }  # fmt: skip
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Host", (_Host,), {"state": state}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", state
    server.shutdown()
    server.server_close()


PROMPTS = [("p/0", [1]), ("p/1", [2, 3]), ("p/2", [9])]


def _measure(served: ServedDrafter, relay: bool) -> Acceptance:
    return served.measure(PROMPTS, relay=relay, temperature=1.0, max_new_tokens=6, concurrency=2)


def test_served_arms(host: tuple[str, dict[str, Any]]) -> None:
    """Catches counters that are not differences, arms on the wrong side of the switch, and unsent parameters."""
    url, state = host
    served = ServedDrafter(url + "/")
    with served.relay_restored():
        off, on = _measure(served, False), _measure(served, True)
        served_off_again = _measure(served, False)
    assert (off.tau, on.tau, served_off_again.tau) == (2.0, 3.0, 2.0)  # the answer without a round is not counted
    assert [outcome.id for outcome in on.outcomes] == ["p/0", "p/1", "p/2"]
    assert off.by_depth == [4 / 6, 0.0, 0.0] and on.by_depth == [1.0, 0.5, 0.0]
    assert (off.hit_rate, on.hit_rate) == (0.0, 0.5)
    assert state["switched"] == [0, 1, 0, 1]  # and back to what it was
    assert all(b["sampling_params"] == {"temperature": 1.0, "max_new_tokens": 6} for b in state["bodies"])


def test_served_without_relay(host: tuple[str, dict[str, Any]]) -> None:
    """Another algorithm is measured as it is, and never switched."""
    url, state = host
    state["algorithm"], state["dflow"] = "DFLASH", {}
    served = ServedDrafter(url)
    with served.relay_restored():
        assert _measure(served, False).tau == 2.0
        with pytest.raises(ValueError, match="runs DFLASH without a relay"):
            _measure(served, True)
    assert state["switched"] == []
    state["algorithm"] = None
    with pytest.raises(ValueError, match="without speculation"):
        ServedDrafter(url)
    state["algorithm"], state["dflow"] = "DFLOW", {"relay": "off"}  # switched off at start: there is no pool
    assert not ServedDrafter(url).has_relay
