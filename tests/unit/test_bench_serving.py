"""`sglang-dflow bench serving` without a server: order, resume, refusals, disagreeing answers."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import pytest

from sglang_dflow.bench import agreement, arms, serving, workload
from sglang_dflow.bench.run_directory import RunDirectory
from sglang_dflow.prompts import Prompt
from sglang_dflow.server import ServerSpec
from sglang_dflow.verify import Difference
from tests.unit.bench_toys import level, request, sweep


class _FakeServer:
    """Counts how often each arm is started; one arm may be told to fail."""

    started: ClassVar[list[str]] = []
    failing: ClassVar[str | None] = None
    url = "http://none"

    def __init__(self, spec: ServerSpec, **kwargs: Any) -> None:
        self.spec = spec

    def __enter__(self) -> _FakeServer:
        _FakeServer.started.append(self.spec.model)
        if self.spec.model == self.failing:
            raise RuntimeError("no memory")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A sweep of three arms whose servers are made up; returns its arguments."""
    _FakeServer.started, _FakeServer.failing = [], None

    def fake_arms(wanted: list[str], models: Any, scratch: Path, **kwargs: Any) -> list[arms.Arm]:
        return [
            arms.Arm("no speculation", ServerSpec("plain")),
            arms.Arm("DFLOW", ServerSpec("flow")),
            arms.Arm("EAGLE-3", None, "no head given"),
        ]

    def fake_level(server: Any, asked: Any, args: Any, concurrency: int, label: str) -> Any:
        rounds = 5 if label == "DFLOW" else 0
        return level([request(9, rounds, (1, 4) if rounds else ())] * 2, 1.0, concurrency)

    monkeypatch.setattr(serving, "Server", _FakeServer)
    monkeypatch.setattr(serving, "make_arms", fake_arms)
    monkeypatch.setattr(serving, "measure_level", fake_level)
    asked = workload.Workload([Prompt("a/0", "A"), Prompt("a/1", "B")], [[1], [2]])
    monkeypatch.setattr(serving, "workload", lambda *args: asked)
    return ["--target", "T", "--drafter", "D", "--concurrency", "1,2", "--repeats", "2", "--out", str(tmp_path / "run")]


def test_last_line_has_every_point(bench: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Also the arm that cannot run, with its reason, and what the numbers were made with."""
    assert serving.main(bench) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(p["arm"], p["concurrency"]) for p in record["points"]] == [
        ("no speculation", 1), ("no speculation", 2), ("DFLOW", 1), ("DFLOW", 2),
    ]  # fmt: skip
    assert {"arm": "EAGLE-3", "runs": False, "reason": "no head given"} in record["arms"]
    assert record["outputs"]["equal"] and len(set(record["outputs"]["hashes"].values())) == 1
    assert {"git_commit", "versions", "machine"} <= set(record["settings"])
    assert record["command"].startswith("sglang-dflow bench serving --target T")
    assert _FakeServer.started == ["plain", "flow", "flow", "plain"]  # the order rotates with the repeat


def test_interrupted_sweep_goes_on(bench: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _FakeServer.failing = "flow"
    assert serving.main(bench) == 1
    assert "no memory" in capsys.readouterr().err
    _FakeServer.failing, _FakeServer.started = None, []
    assert serving.main(bench) == 0
    assert _FakeServer.started == ["flow", "flow", "plain"]
    _FakeServer.started = []
    assert serving.main(bench) == 0
    assert _FakeServer.started == []


def test_other_settings_are_refused(bench: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A mixture of two settings would look like one sweep. More repeats of the same are welcome."""
    assert serving.main(bench) == 0
    assert serving.main([*bench, "--max-new-tokens", "7"]) == 1
    assert "other settings (max_new_tokens: there 128, now 7)" in capsys.readouterr().err
    _FakeServer.started = []
    assert serving.main([*bench, "--repeats", "3"]) == 0
    assert _FakeServer.started == ["plain", "flow"]


@pytest.mark.parametrize("tie", [True, False])
def test_disagreeing_answers_fail_unless_tied(
    bench: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tie: bool
) -> None:
    """Exit status 1 and the place of the fault; a tie within the dtype's rounding is told, and passes."""

    def fake_level(server: Any, asked: Any, args: Any, concurrency: int, label: str) -> Any:
        return level([request(first=int(label == "DFLOW")), request()], 1.0, concurrency)

    def fake_explain(url: str, prompt: Prompt, *args: Any, **kwargs: Any) -> Difference:
        return Difference(prompt.id, 0, 0, 1, -0.5, -0.5001 if tie else -3.0, tie)

    monkeypatch.setattr(serving, "measure_level", fake_level)
    monkeypatch.setattr(agreement, "Server", _FakeServer)
    monkeypatch.setattr(agreement, "explain_difference", fake_explain)
    assert serving.main(bench) == (0 if tie else 1)
    out = capsys.readouterr().out
    record = json.loads(out.splitlines()[-1])
    assert not record["outputs"]["equal"]
    assert (record["outputs"]["ties"], record["outputs"]["mismatches"]) == ((1, 0) if tie else (0, 1))
    assert len(set(record["outputs"]["hashes"].values())) == 2
    assert ("FAILED: 1 answers differ" in out) is not tie
    assert f"{'tie' if tie else 'MISMATCH'} at DFLOW, repeat 0, concurrency 1: prompt a/0, output token 0" in out


def test_nothing_to_run_is_an_error(
    bench: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "make_arms", lambda *args, **kwargs: [arms.Arm("EAGLE-3", None, "no head given")])
    assert serving.main([*bench, "--arms", "eagle3"]) == 1
    out, err = capsys.readouterr()
    assert "EAGLE-3: not run, no head given" in out and "none of the arms can run" in err


def test_parts_survive_the_file(tmp_path: Path) -> None:
    """Also a line that a crash cut off: its part is dropped, the next one is not glued to it."""
    run = RunDirectory(tmp_path, {"a": (1, 2)})
    parts = sweep()
    for part in parts[:2]:
        run.append(part)
    with (tmp_path / "points.jsonl").open("a") as sink:
        sink.write('{"arm": "DFL')
    run = RunDirectory(tmp_path, {"a": (1, 2)})
    assert run.parts() == parts[:2]
    run.append(parts[2])
    assert run.parts() == parts[:3]


def test_rotation_puts_every_arm_first_once() -> None:
    three = [arms.Arm(name, ServerSpec(name)) for name in "ABC"]
    order = [(arm.name, repeat) for arm, repeat in serving.schedule(three, 3)]
    assert "".join(name for name, _ in order) == "ABCBCACAB"
    assert [repeat for _, repeat in order] == [0] * 3 + [1] * 3 + [2] * 3


def test_arms_share_everything_but_speculation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And each that cannot run says why."""
    monkeypatch.setattr(arms, "strip_relay", lambda source, path: path.mkdir())
    monkeypatch.setattr(arms, "has_cuda", lambda: False)
    made = arms.make_arms(
        list(arms.ALIASES), arms.Models("T", "D", eagle3="E"), tmp_path, dtype="float32", extra_args=["--x"]
    )
    specs = {arm.name: arm.spec for arm in made if arm.spec is not None}
    assert {(s.model, s.dtype, tuple(s.extra_args)) for s in specs.values()} == {("T", "float32", ("--x",))}
    assert [(name, s.drafter, s.algorithm) for name, s in specs.items() if s.drafter] == [
        ("DFLASH", str(tmp_path / "dflash-drafter"), "DFLASH"),
        ("DFLOW relay off", "D", "DFLOW"),
        ("DFLOW", "D", "DFLOW"),
    ]
    assert specs["DFLOW relay off"].env == {"SGLANG_DFLOW_RELAY": "off"} and specs["DFLOW"].env == {}
    reasons = {arm.name: arm.reason for arm in made if arm.spec is None}
    assert set(reasons) == {"DFLOW over Domino", "EAGLE-3"}
    assert "--domino" in str(reasons["DFLOW over Domino"]) and "CPU platform" in str(reasons["EAGLE-3"])


def test_prompt_sets_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One of each in turn, so that a few requests are as mixed as many; too few are refused."""

    class Tokenizer:
        @staticmethod
        def apply_chat_template(messages: list[dict[str, str]], **kwargs: Any) -> str:
            return messages[0]["content"]

        @staticmethod
        def encode(text: str, **kwargs: Any) -> list[int]:
            return list(text.encode())

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda path: Tokenizer)
    for name in "ab":
        lines = [
            json.dumps({"id": f"{name}/{i}", "turns": [f"{name}{i}"]}) + "\n" for i in range(2 if name == "a" else 3)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    args = serving._parser().parse_args(["--prompts", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
    asked = workload.workload(args, "T", 5)
    assert [prompt.id for prompt in asked.prompts] == ["a/0", "b/0", "a/1", "b/1", "b/2"]
    assert asked.ids[1] == list(b"b0")
    with pytest.raises(ValueError, match="6 prompts are needed .* found 5"):
        workload.workload(args, "T", 6)
