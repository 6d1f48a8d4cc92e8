"""training/data.py and the two generators behind it: answer files that are interrupted, resumed, served."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from sglang_dflow.training import data as data_module
from sglang_dflow.training import states as states_module
from sglang_dflow.training.answer_server import ServerGenerate
from sglang_dflow.training.data import (
    Answer,
    answer_conversations,
    answer_prompts,
    main,
    read_answers,
    state_rows,
    turn_prompts,
)
from sglang_dflow.training.dataset import Sample, load_sequences
from sglang_dflow.training.generate import Generated, LocalGenerate, Sampling, cut_loop, generate_batch
from sglang_dflow.training.prompts import Conversation, Prompt
from sglang_dflow.training.states import states_dir
from sglang_dflow.training.target import Target, causal_attend
from tests.unit.training_toys import ToyTokenizer, toy_target, trajectory_of

FOREVER = float("inf")
PROMPTS = [Prompt(f"p/{i}", "toy", [3 + (7 * i + j) % 37 for j in range(1 + i % 4)]) for i in range(12)]


def _silent(_line: str) -> None:
    return None


def _check_states(target: Target, samples: Sequence[Sample]) -> None:
    """Every sample has the states of its own text."""
    for sample in samples:
        ids = sample.tokens[None]
        full = target.forward(ids, torch.arange(ids.shape[1])[None], causal_attend(target.shape), capture=True)
        assert sample.states is not None and full.captured is not None
        # bf16 keeps 8 bits of the float32 states
        assert torch.allclose(sample.states.float(), full.captured[0, :-1], rtol=1e-2, atol=1e-3)


class _Stops:
    """A generator that fails in the middle of call ``calls``."""

    def __init__(self, target: Target, calls: int) -> None:
        self.inner, self.left, self.asked = LocalGenerate(target), calls, 0

    def __call__(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling, seed: int, capture: bool
    ) -> list[Generated]:
        self.asked += len(prompts)
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return self.inner(prompts, max_new_tokens, sampling, seed, capture)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 0.9)])
def test_an_interrupted_run_goes_on_to_the_same_file(tmp_path: Path, sampling: Sampling) -> None:
    """Catches answers that are made twice, lost, glued to a torn line, or separated from their states."""
    target = toy_target()
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert answer_prompts(target, PROMPTS, whole, 9, 4, FOREVER, _silent, sampling=sampling, seed=3)
    with pytest.raises(KeyboardInterrupt):
        answer_prompts(
            target, PROMPTS, parts, 9, 4, FOREVER, _silent, sampling=sampling, seed=3, generate=_Stops(target, 2)
        )
    assert len(read_answers([parts])) == 8
    with parts.open("a") as file:
        file.write('{"id": "p/9", "domain": "to')
    assert len(read_answers([parts])) == 8
    rest = _Stops(target, 99)
    assert answer_prompts(target, PROMPTS, parts, 9, 4, FOREVER, _silent, sampling=sampling, seed=3, generate=rest)
    assert rest.asked == 4
    assert parts.read_bytes() == whole.read_bytes()
    assert len(read_answers([whole])) == 12
    names = [path.name for path in sorted(states_dir(parts).iterdir())]
    assert names == ["00000.safetensors", "00001.safetensors", "00002.safetensors"]
    for name in names:
        got, expected = load_file(states_dir(parts) / name), load_file(states_dir(whole) / name)
        assert torch.equal(got["states"], expected["states"])
    _check_states(target, load_sequences([parts], 32, target_layer_ids=[0, 2]))


def test_a_batch_that_was_written_in_part_is_completed(tmp_path: Path) -> None:
    """Catches a conversation that is trained with the states of a discarded answer."""
    target, path = toy_target(), tmp_path / "a.jsonl"
    assert answer_prompts(target, PROMPTS, path, 9, 4, FOREVER, _silent, sampling=Sampling(1.0), seed=3)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:9]) + lines[9][:30])
    assert answer_prompts(target, PROMPTS, path, 9, 4, FOREVER, _silent, sampling=Sampling(1.0), seed=4)
    assert path.read_text().startswith("".join(lines[:9]))
    samples = load_sequences([path], 32)
    assert sorted(sample.id for sample in samples) == sorted(prompt.id for prompt in PROMPTS)
    _check_states(target, samples)


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    """Catches answers that vanish without a word."""
    path = tmp_path / "a.jsonl"
    good = json.dumps(Answer("x", "d", [1], [2], "eos")._asdict())
    path.write_text(f"{good}\n{good[:20]}{good}\n{good}\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2: .*delete the line"):
        read_answers([path])


def test_time_budget_and_progress(tmp_path: Path) -> None:
    """Catches a budget that is ignored, and a progress line without rate and remaining time."""
    lines: list[str] = []
    assert not answer_prompts(toy_target(), PROMPTS, tmp_path / "a.jsonl", 5, 4, 0.0, lines.append, states=False)
    assert "time budget" in lines[-1] and not read_answers([tmp_path / "a.jsonl"])
    assert answer_prompts(toy_target(), PROMPTS, tmp_path / "a.jsonl", 5, 4, FOREVER, lines.append, states=False)
    assert "12 of 12 prompts, 60 tokens, " in lines[-1] and "tokens/s, about 0.0 min left" in lines[-1]
    assert not states_dir(tmp_path / "a.jsonl").exists()


def test_the_size_of_the_states_is_told_and_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a cache that fills the disk, and a size that is far from the real one."""

    class Usage:
        free = 1000

    lines: list[str] = []
    monkeypatch.setattr(states_module.shutil, "disk_usage", lambda _path: Usage)
    with pytest.raises(RuntimeError, match="--no-states"):
        answer_prompts(toy_target(), PROMPTS, tmp_path / "a.jsonl", 9, 4, FOREVER, lines.append)
    assert not (tmp_path / "a.jsonl").exists() and not states_dir(tmp_path / "a.jsonl").exists()
    monkeypatch.undo()
    target = toy_target()
    told = data_module._most_state_bytes(target, PROMPTS, 9)
    answer_prompts(target, PROMPTS, tmp_path / "a.jsonl", 9, 4, FOREVER, lines.append)
    answers = read_answers([tmp_path / "a.jsonl"])
    assert told == 2 * 32 * sum(len(a.prompt_ids) + 9 - 1 for a in answers)
    assert told >= 2 * 32 * sum(state_rows(a) for a in answers)


def test_sampling() -> None:
    """Catches a temperature, a nucleus or a seed that has no effect: shares of the first token against softmax."""
    target = toy_target()
    prompt = [5, 6, 7]
    hidden = target.forward(torch.tensor([prompt]), torch.arange(3)[None], causal_attend(target.shape)).hidden
    logits = target.logits(hidden[0, -1])

    def first(sampling: Sampling, seed: int) -> torch.Tensor:
        results = LocalGenerate(target)([prompt] * 4000, 1, sampling, seed, False)
        return torch.tensor([result.tokens[0] for result in results])

    for temperature in (0.7, 2.0):
        shares = torch.bincount(first(Sampling(temperature), 1), minlength=40) / 4000
        expected = torch.softmax(logits / temperature, -1)
        assert (shares - expected).abs().max() < 0.03  # 4 standard errors of a share of 0.5
    nucleus = first(Sampling(2.0, 0.5), 1)
    probs, order = torch.softmax(logits / 2.0, -1).sort(descending=True)
    inside = order[: int((probs.cumsum(-1) < 0.5).sum()) + 1]
    assert set(nucleus.tolist()) == set(inside.tolist())
    assert torch.equal(first(Sampling(2.0), 5), first(Sampling(2.0), 5))
    assert not torch.equal(first(Sampling(2.0), 5), first(Sampling(2.0), 6))


def test_loops_are_cut_alike_in_both_generators() -> None:
    """Catches a server's answer that keeps a loop, or loses its end: against the generator that cuts while it goes."""
    target = toy_target()
    prompts = [[3 + i, 4 + i % 9] for i in range(37)]
    raw = generate_batch(target, prompts, 90, cut_loops=False)
    counts = torch.bincount(torch.tensor([token for result in raw for token in result.tokens]))
    target.eos_token_ids = [int(counts.topk(12).indices[-1])]
    raw, cut = (generate_batch(target, prompts, 90, cut_loops=cut_loops) for cut_loops in (False, True))
    assert {result.finish for result in cut} >= {"eos", "loop"}
    for uncut, expected in zip(raw, cut):
        assert cut_loop(uncut.tokens, uncut.finish) == (expected.tokens, expected.finish)


# --- turns and samples -----------------------------------------------------------------------------------


def _answer(name: str, ids: list[int], finish: str = "eos") -> Answer:
    return Answer(name, "d", [1], ids, finish)


def test_later_turns_stand_behind_the_own_earlier_answers() -> None:
    """Catches a history with another sample's answer, without the system message, or behind a cut answer."""
    tokenizer = ToyTokenizer()
    conversations = [Conversation("c", "d", ["one", "two", "three"], "sys"), Conversation("e", "d", ["only"])]
    first = turn_prompts(conversations, tokenizer, {}, 0, samples=2)
    assert [prompt.id for prompt in first] == ["c", "c#s1t0", "e", "e#s1t0"]
    assert first[0].ids == tokenizer("s:sys\nu:one\na:", add_special_tokens=False)["input_ids"]
    given = [_answer(name, tokenizer.remember(text)) for name, text in (("c", "A"), ("c#s1t0", "B"), ("c#s1t1", "C"))]
    answers = {answer.id: answer for answer in [*given, _answer("c#s0t1", [7], "length")]}
    second = turn_prompts(conversations, tokenizer, answers, 1, samples=2)
    assert [prompt.id for prompt in second] == ["c#s0t1", "c#s1t1"]
    wanted = "s:sys\nu:one\na:B\nu:two\na:"
    assert second[1].ids == tokenizer(wanted, add_special_tokens=False)["input_ids"]
    third = turn_prompts(conversations, tokenizer, answers, 2, samples=2)
    assert [prompt.id for prompt in third] == ["c#s1t2"]
    wanted = "s:sys\nu:one\na:B\nu:two\na:C\nu:three\na:"
    assert third[0].ids == tokenizer(wanted, add_special_tokens=False)["input_ids"]


def test_conversations_are_answered_turn_after_turn(tmp_path: Path) -> None:
    """Catches a turn that is answered before the one it follows, and a prompt that is too long for the target."""
    target = toy_target()
    target.eos_token_ids = list(range(3, 40, 2))
    conversations = [Conversation(f"c/{i}", "d", ["ab"[: 1 + i % 2] + str(i), "more", "still"]) for i in range(6)]
    lines: list[str] = []
    path = tmp_path / "a.jsonl"
    fixed: dict[str, Any] = {
        "max_new_tokens": 12, "batch_rows": 4, "deadline": FOREVER, "log": lines.append, "turns": "all", "samples": 1,
    }  # fmt: skip
    assert answer_conversations(target, ToyTokenizer(), conversations, path, max_prompt_tokens=200, **fixed)
    answers = {answer.id: answer for answer in read_answers([path])}
    later = [name for name in answers if name.endswith("t1")]
    assert later and all(answers[name.split("#")[0]].finish == "eos" for name in later)
    ended = {name for name, answer in answers.items() if answer.finish == "eos" and not name.endswith("t2")}
    assert len(answers) == 6 + len(ended)
    _check_states(target, load_sequences([path], 32))
    short = tmp_path / "b.jsonl"
    assert answer_conversations(target, ToyTokenizer(), conversations, short, max_prompt_tokens=7, **fixed)
    assert {answer.id for answer in read_answers([short])} == {"c/0", "c/2", "c/4"}
    assert any("3 prompts above 7 tokens left out" in line for line in lines)


# --- a server --------------------------------------------------------------------------------------------


class _Stub(ThreadingHTTPServer):
    """An SGLang server's /generate, as far as it is used, with the toy target behind it."""

    def __init__(self) -> None:
        self.target, self.requests, self.trim = toy_target(), [], False  # type: tuple[Target, list[Any], bool]
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: _Stub

    def do_GET(self) -> None:
        self._reply({"model_path": "toy"} if self.path == "/model_info" else None)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        replies = []
        for result in generate_batch(
            self.server.target, body["input_ids"], body["sampling_params"]["max_new_tokens"], cut_loops=False
        ):
            ended = result.finish == "eos"
            reason = {"type": "stop", "matched": result.tokens[-1]} if ended else {"type": "length", "length": 9}
            ids = result.tokens[:-1] if ended and self.server.trim else result.tokens
            replies.append({"text": "", "output_ids": ids, "meta_info": {"finish_reason": reason}})
        self._reply(replies if self.path == "/generate" else None)

    def _reply(self, content: Any) -> None:
        self.send_response(404 if content is None else 200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, format: str, *args: Any) -> None:
        return None


@pytest.fixture
def stub() -> Iterator[_Stub]:
    server = _Stub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("trim", [False, True])
def test_a_server_gives_the_same_file_as_this_process(tmp_path: Path, stub: _Stub, trim: bool) -> None:
    """Catches answers in another order, without their end token, with loops, or with another answer's states."""
    stub.trim = trim
    target = stub.target
    target.eos_token_ids = [trajectory_of(target, PROMPTS[5].ids, 6)[-1]]
    local, served = tmp_path / "local.jsonl", tmp_path / "served.jsonl"
    answer_prompts(target, PROMPTS, local, 60, 4, FOREVER, _silent)
    server = ServerGenerate(stub.url + "/")
    assert server.model_path() == "toy"
    answer_prompts(target, PROMPTS, served, 60, 4, FOREVER, _silent, generate=server)
    assert served.read_bytes() == local.read_bytes()
    assert {"eos", "loop"} <= {answer.finish for answer in read_answers([served])}
    _check_states(target, load_sequences([served], 32))
    assert len(stub.requests) == 3
    assert stub.requests[0]["sampling_params"] == {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 60}
    answer_prompts(None, PROMPTS, tmp_path / "x.jsonl", 5, 4, FOREVER, _silent, generate=server, states=False,
                   sampling=Sampling(0.6, 0.9))  # fmt: skip
    assert stub.requests[-1]["sampling_params"] == {"temperature": 0.6, "top_p": 0.9, "top_k": 200, "max_new_tokens": 5}
    with pytest.raises(ValueError, match="needs the target itself"):
        answer_prompts(None, PROMPTS, tmp_path / "y.jsonl", 5, 4, FOREVER, _silent, generate=server)


def test_server_failures_say_what_to_do(stub: _Stub) -> None:
    """Catches a request's stack trace, and an aborted request that becomes an empty answer."""
    with pytest.raises(RuntimeError, match=r"/nowhere/generate failed: 404.*leave out --server"):
        ServerGenerate(stub.url + "/nowhere")([[3]], 4, Sampling(), 0, False)
    aborted = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "too long"}}}
    with pytest.raises(RuntimeError, match="abort.*server's log"):
        ServerGenerate(stub.url)._generated(aborted)
    with pytest.raises(RuntimeError, match="no output_ids"):
        ServerGenerate(stub.url)._generated({"meta_info": {"finish_reason": {"type": "length", "length": 4}}})


# --- the command -----------------------------------------------------------------------------------------


@pytest.fixture
def toy_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """``prepare-data`` with the toy target and tokenizer."""
    monkeypatch.setattr(Target, "load", lambda *_args: toy_target())
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _path: ToyTokenizer())


@pytest.mark.usefixtures("toy_command")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an option that does not arrive: exclusion, hold-out, shards, samples, a changed plan."""
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps({"id": f"t/{i}", "turns": [f"text {i}"]}) + "\n" for i in range(10)))
    held = tmp_path / "eval.jsonl"
    held.write_text('{"id": "e", "turns": ["Text  7"]}\n')
    out = tmp_path / "data" / "a.jsonl"
    base = ["--target", "toy", "--max-prompt-tokens", "64", "--max-new-tokens", "6", "--target-layer-ids", "0,2"]

    def run(*more: str, out: Path = out) -> int:
        return main([*base, "--out", str(out), *more])

    assert run("--prompts", f"{train}:4", "--batch-rows", "2") == 0
    first = out.read_bytes()
    assert len(read_answers([out])) == 4
    assert run("--prompts", f"{train}:4", "--batch-rows", "2") == 0 and out.read_bytes() == first
    assert run("--prompts", f"{train}:5") == 1
    assert "begun with other settings: prompts" in capsys.readouterr().err and out.read_bytes() == first

    rest = tmp_path / "data" / "b.jsonl"
    assert run("--prompts", str(train), "--exclude", str(out), "--no-states", out=rest) == 0
    ids = [{answer.id for answer in read_answers([path])} for path in (out, rest)]
    assert len(ids[1]) == 6 and not ids[0] & ids[1]
    assert states_dir(out).exists() and not states_dir(rest).exists()

    assert run("--prompts", str(train), "--hold-out", str(held), out=tmp_path / "c.jsonl") == 1
    assert "t/7" in capsys.readouterr().err and not (tmp_path / "c.jsonl").exists()

    shards = [tmp_path / f"s{i}.jsonl" for i in range(2)]
    for i, path in enumerate(shards):
        sampled = ("--temperature", "1", "--samples-per-prompt", "2", "--shard", f"{i}/2")
        assert run("--prompts", str(train), *sampled, out=path) == 0
    names = [[answer.id for answer in read_answers([path])] for path in shards]
    assert all(names) and sorted(names[0] + names[1]) == sorted(f"t/{i}{s}" for i in range(10) for s in ("", "#s1t0"))
    answers = {a.id: a.answer_ids for a in read_answers(shards)}
    assert any(answers[f"t/{i}"] != answers[f"t/{i}#s1t0"] for i in range(10))

    assert run("--prompts", str(train), "--minutes", "1e-9", out=tmp_path / "d.jsonl") == 3
    assert run("--prompts", str(train), "--max-new-tokens", "200", out=tmp_path / "e.jsonl") == 1
    assert "the target has 256 positions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ((), "no prompts"),
        (("--prompts", "x", "--samples-per-prompt", "2"), "needs --temperature"),
        (("--prompts", "x", "--shard", "2/2"), "is not i/n"),
        (("--prompts", "x", "--top-p", "0"), "--top-p in"),
    ],
)
def test_arguments_that_make_no_sense(more: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a run that starts although its result would be useless."""
    with pytest.raises(SystemExit):
        main(["--target", "toy", "--out", "a.jsonl", *more])
    assert problem in capsys.readouterr().err


@pytest.mark.usefixtures("toy_command")
def test_the_command_through_a_server(tmp_path: Path, stub: _Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a server run that still loads the target's weights, or answers in this process."""
    train = tmp_path / "train.jsonl"
    train.write_text('{"id": "t", "prompt": "text"}\n')
    monkeypatch.setattr(Target, "load", lambda *_args: pytest.fail("the target is not needed"))
    command = ["--target", "toy", "--prompts", str(train), "--out", str(tmp_path / "a.jsonl"), "--server", stub.url]
    assert main([*command, "--max-new-tokens", "5", "--no-states"]) == 0
    assert len(stub.requests) == 1 and [a.id for a in read_answers([tmp_path / "a.jsonl"])] == ["t"]
