"""training/prompts.py: layouts, sources, the mix, and the guard around evaluation sets."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_dflow.training.generate import Generated, Sampling
from sglang_dflow.training.prompts import (
    BOXED,
    Conversation,
    HoldOut,
    Mix,
    Source,
    answer_id,
    collect,
    conversation_of,
    read_conversations,
    read_hub,
    read_turns,
)
from tests.unit.training_toys import ToyTokenizer

LONG = "A baker makes 14 trays of rolls with 12 rolls on each tray."


def _write(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _silent(_line: str) -> None:
    return None


def _mix(**fields: Any) -> Mix:
    settings: dict[str, Any] = {
        "sources": [], "own": {}, "boxed": {}, "hold_out": [], "exclude": [], "seed": 0, "shard": 0, "shards": 1,
    }  # fmt: skip
    return Mix(**(settings | fields))


def _no_generation(*_args: Any) -> list[Generated]:
    raise AssertionError("nothing is to be generated")


def test_layouts(tmp_path: Path) -> None:
    """Catches a layout whose answers, or none of whose user turns, become prompts."""
    file = _write(
        tmp_path / "mixed.jsonl",
        [
            {"id": "set/1", "turns": ["a", "b"]},
            {"prompt": "p"},
            {"question": "q", "answer": "42"},
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"},
                          {"role": "assistant", "content": "x"}, {"role": "user", "content": "v"}]},
            {"id": "g", "conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "x"}]},
            {"prompt": [{"role": "user", "content": "w"}]},
        ],
    )  # fmt: skip
    assert read_conversations(file) == [
        Conversation("set/1", "set", ["a", "b"]),
        Conversation("mixed/1", "mixed", ["p"]),
        Conversation("mixed/2", "mixed", ["q"]),
        Conversation("mixed/3", "mixed", ["u", "v"], "s"),
        Conversation("g", "mixed", ["h"]),
        Conversation("mixed/5", "mixed", ["w"]),
    ]
    assert {c.domain for c in read_conversations(file, "own")} == {"own"}
    assert read_turns(file)[0] == ("set/1", ["a", "b"])


@pytest.mark.parametrize("line", ["{", "[]", '{"turns": []}', '{"turns": [3]}', '{"prompt": " "}', '{"messages": []}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    """Catches a prompt that is skipped without a word."""
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: .*expected"):
        read_conversations(file)


def test_source_arguments() -> None:
    """Catches a count that is read as a domain."""
    assert Source.parse("a.jsonl") == Source("a.jsonl", 0, "")
    assert Source.parse("a.jsonl:5") == Source("a.jsonl", 5, "")
    assert Source.parse("org/set@test@main::math") == Source("org/set@test@main", 0, "math")
    for bad in ("", "a:b", "a:1:c:d", ":3"):
        with pytest.raises(ValueError, match="--prompts"):
            Source.parse(bad)


def test_answer_ids_lead_back_to_their_conversation() -> None:
    """Catches an id of a user's own that looks like a turn."""
    assert answer_id("set/1", 0, 0) == "set/1"
    assert answer_id("set/1", 2, 1) == "set/1#s2t1"
    for name in ("set/1", "issue#12", "odd#s1t1x"):
        assert conversation_of(answer_id(name, 3, 4)) == name == conversation_of(name)


class _Table(list):  # type: ignore[type-arg]
    """What datasets.load_dataset gives, as far as it is used."""


def test_hub_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a split or configuration that is dropped, a count that is ignored, records without a user turn."""
    asked = []

    class Datasets:
        @staticmethod
        def load_dataset(name: str, config: str | None, split: str) -> _Table:
            asked.append((name, config, split))
            return _Table([{"question": f"q{i}"} if i % 2 else {"other": "x"} for i in range(40)])

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    found = read_hub(Source.parse("org/set@test@main:7:math"), random.Random(0), _silent)
    assert asked == [("org/set", "main", "test")]
    assert len(found) == len({c.id for c in found}) == 7 and {c.domain for c in found} == {"math"}
    assert all(c.turns == ["q" + c.id.removeprefix("org/set/")] for c in found)
    assert found == read_hub(Source.parse("org/set@test@main:7:math"), random.Random(0), _silent)
    assert len(read_hub(Source.parse("org/set"), random.Random(0), _silent)) == 20
    assert asked[-1] == ("org/set", None, "train")


def test_hub_failures_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a bare ImportError or a hub client's stack trace."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RuntimeError, match="pip install datasets"):
        read_hub(Source.parse("org/set"), random.Random(0), _silent)

    class Datasets:
        @staticmethod
        def load_dataset(*_args: Any, **_kwargs: Any) -> _Table:
            raise OSError("no route")

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    with pytest.raises(RuntimeError, match=r"could not be loaded from the hub \(OSError: no route\).*local"):
        read_hub(Source.parse("org/set"), random.Random(0), _silent)


def test_hold_out(tmp_path: Path) -> None:
    """Catches an evaluation prompt that slips in with other blanks, case or instructions; and false alarms."""
    file = _write(
        tmp_path / "eval.jsonl", [{"id": "e", "turns": [LONG + BOXED]}, {"id": "f", "turns": ["Say hi.", "Why?"]}]
    )
    hold_out = HoldOut([file])
    for text in (LONG, LONG + BOXED, "a BAKER  makes 14 trays of rolls\nwith 12 rolls on each tray", "say hi", "WHY"):
        assert hold_out.holds(text), text
    assert hold_out.holds(f"Question: {LONG} {BOXED} Thanks")
    for text in ("Say hi to the baker.", "A baker makes 14 trays of rolls with 13 rolls on each tray.", "on each tray"):
        assert not hold_out.holds(text), text
    good, bad = Conversation("g", "d", ["Hello"]), Conversation("b/1", "d", ["Hello", "why?"])
    hold_out.refuse([good])
    with pytest.raises(ValueError, match=r"1 prompts occur in the --hold-out files.*b/1"):
        hold_out.refuse([good, bad])
    train = _write(tmp_path / "train.jsonl", [{"id": "t", "turns": [LONG]}])
    with pytest.raises(ValueError, match="--hold-out"):
        collect(
            _mix(sources=[Source(str(train), 0, "")], hold_out=[str(file)]), _no_generation, ToyTokenizer(), _silent
        )


def test_the_mix(tmp_path: Path) -> None:
    """Catches counts, exclusion, suffixes or an order that depend on anything but the seed; and overlapping shards."""
    first = _write(tmp_path / "a.jsonl", [{"id": f"a/{i}", "turns": [f"text {i}", "more"]} for i in range(30)])
    second = _write(tmp_path / "b.jsonl", [{"id": f"b/{i}", "turns": [f"other {i}"]} for i in range(30)])
    sources = [Source(str(first), 20, ""), Source(str(second), 0, "second")]
    mix = _mix(sources=sources, boxed={"a": 0.5}, exclude=["b/3", "b/4#s0t1"])

    def collected(mix: Mix) -> list[Conversation]:
        return collect(mix, _no_generation, ToyTokenizer(), _silent)

    whole = collected(mix)
    assert whole == collected(mix) and whole != collected(mix._replace(seed=1))
    names = {c.id for c in whole}
    assert len(whole) == len(names) == 20 + 28 and not {"b/3", "b/4"} & names
    assert {c.domain for c in whole} == {"a", "second"}
    assert [c.id[0] for c in whole] != sorted(c.id[0] for c in whole)
    boxed = [c for c in whole if c.turns[0].endswith(BOXED)]
    assert {c.domain for c in boxed} == {"a"} and 5 <= len(boxed) <= 15 and all(c.turns[1] == "more" for c in boxed)
    parts = [collected(mix._replace(shard=i, shards=3)) for i in range(3)]
    assert sorted(c.id for part in parts for c in part) == sorted(names) and all(parts)
    assert {c for part in parts for c in map(str, part)} == set(map(str, whole))
    with pytest.raises(ValueError, match="ids occur twice"):
        collected(_mix(sources=[Source(str(second), 0, ""), Source(str(second), 0, "")]))
    with pytest.raises(ValueError, match="no such file"):
        collected(_mix(sources=[Source(str(tmp_path / "c.jsonl"), 0, "")]))


def test_own_prompts(tmp_path: Path) -> None:
    """Catches repeated, looping, cut off or held-out turns among those that the target writes."""
    tokenizer, calls = ToyTokenizer(), []
    outcomes = [("one and some more", "eos"), ("one and some more", "eos"), ("two and some more", "length"),
                ("three and some more", "loop"), (" " + LONG, "eos"), ("four and some more", "eos")]  # fmt: skip

    def generate(prompts: Sequence[Any], limit: int, sampling: Sampling, seed: int, capture: bool) -> list[Generated]:
        calls.append((len(prompts), limit, sampling.temperature, seed, capture))
        chosen = [outcomes[i % len(outcomes)] for i in range(len(prompts))]
        return [Generated(tokenizer.remember(text), finish, None) for text, finish in chosen]

    held = _write(tmp_path / "eval.jsonl", [{"turns": [LONG]}])
    mix = _mix(own={"chat": 20}, hold_out=[str(held)], boxed={"chat": 1.0})
    found = collect(mix, generate, tokenizer, _silent)
    texts = [c.turns[0].removesuffix(BOXED) for c in found]
    assert len(set(texts)) == 20 and all("one and" in text or "four and" in text for text in texts)
    assert {c.id for c in found} == {f"self-chat/0/{i}" for i in range(20)}
    assert all(c.turns[0].endswith(BOXED) for c in found)
    assert all(call[2] == 1.0 and not call[4] for call in calls)
    shares = [collect(_mix(own={"chat": 5}, shard=i, shards=2), generate, tokenizer, _silent) for i in range(2)]
    assert [len(share) for share in shares] == [3, 2]
    assert not {c.id for c in shares[0]} & {c.id for c in shares[1]}
    with pytest.raises(ValueError, match="'poems' is unknown, expected one of chat"):
        collect(_mix(own={"poems": 5}), generate, tokenizer, _silent)
    outcomes[:] = [("x", "loop")]
    with pytest.raises(RuntimeError, match="only 0 usable chat turns"):
        collect(_mix(own={"chat": 5}), generate, tokenizer, _silent)
