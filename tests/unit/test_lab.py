"""The laboratory: corpus parts, documents as the chat template writes them, and the table driver."""

from __future__ import annotations

import argparse
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.lab import corpus, make_target, plot, table
from sglang_dflow.training.prompts import chat_ids

MODULE = '''
class Reader:
    def read(self, size):
        """Read at most size bytes."""
        if size < 0:
            raise ValueError("size is negative, expected a number of bytes")
        return self.buffer[:size]

def short(x): return x

def plain(rows):
    total = 0
    for row in rows:
        total += len(row) * row.width + row.height
    return total / max(len(rows), 1)
'''


def _documents(tmp_path: Path) -> list[corpus.Document]:
    (tmp_path / "lib").mkdir(exist_ok=True)
    (tmp_path / "lib" / "module.py").write_text(MODULE)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"id": f"gsm8k-train/{i}", "turns": [f"What is {i}?"]}) + "\n" for i in range(200))
    )
    return corpus.collect([], None, prompts, tmp_path / "lib")


def test_a_function_is_split_behind_its_docstring(tmp_path: Path) -> None:
    """Catches a prompt that gives the body away, a lost indentation, and one-line functions."""
    found = {d.prompt: d.text for d in _documents(tmp_path) if d.domain == "function"}
    assert set(found) == {'def read(self, size):\n    """Read at most size bytes."""', "def plain(rows):"}
    assert found["def plain(rows):"].startswith("\n    total = 0\n    for row")


def test_no_prompt_is_in_two_parts(tmp_path: Path) -> None:
    """Catches evaluation prompts that train the target or the drafter, and unanswered ones that train the target."""
    corpus.write(_documents(tmp_path), tmp_path / "out")
    asked = {}
    for part in ("drafter", "eval"):
        files = list((tmp_path / "out" / part).glob("*.jsonl"))
        lines = [line for file in files for line in file.read_text().splitlines()]
        asked[part] = {json.loads(line)["turns"][0] for line in lines}
    trained = {document.prompt for document in corpus.read(tmp_path / "out")}
    assert all(document.text for document in corpus.read(tmp_path / "out"))
    assert asked["drafter"] and asked["eval"]
    assert not asked["drafter"] & asked["eval"] and not (asked["drafter"] | asked["eval"]) & trained
    boxed = "What is 7?" + corpus.BOXED
    assert corpus.part_of(boxed) == corpus.part_of("What is 7?")


def test_training_text_is_what_a_chat_request_becomes(tmp_path: Path) -> None:
    """Catches a chat template that differs from the documents: the target would answer prompts it never saw."""
    documents = [d for d in _documents(tmp_path) if d.text]
    tokenizer = make_target.make_tokenizer(documents, 300)
    document = documents[0]
    (ids,) = make_target.encode([document], tokenizer)
    request = chat_ids(tokenizer, [{"role": "user", "content": document.prompt}])
    assert ids[: len(request)] == request
    assert ids[-1] == tokenizer.eos_token_id and tokenizer.decode(ids[len(request) : -1]) == document.text
    assert tokenizer.convert_tokens_to_ids("<|mask|>") == 3


def test_padding_does_not_change_the_loss(tmp_path: Path) -> None:
    """Catches padded tokens that are seen or counted."""
    documents = [d for d in _documents(tmp_path) if d.text]
    tokenizer = make_target.make_tokenizer(documents, 300)
    sizes = argparse.Namespace(seed=0, hidden=64, intermediate=64, layers=2)
    model = make_target.make_model(tokenizer, sizes)
    rows = make_target.encode(documents, tokenizer)
    assert len({len(row) for row in rows}) > 1
    together, count = make_target.document_loss(model, rows)
    apart = [make_target.document_loss(model, [row]) for row in rows]
    assert count == sum(tokens for _, tokens in apart)
    # bf16 products: another shape sums in another order
    assert float(together.detach()) == pytest.approx(sum(float(loss.detach()) for loss, _ in apart), rel=2e-3)


def _table(tmp_path: Path) -> table.Table:
    recipe = {"target": "t", "answers": ["a"], "run_dir": "r", "num_layers": 1, "source_layers": [0]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    arms = {
        "start": {"fields": {}, "reported": False},
        "dflash": {"fields": {"steps": 5}, "start": "start"},
        "dflow": {"fields": {"method": "dflow"}, "start": "start"},
    }
    content = {"recipe": str(tmp_path / "recipe.yaml"), "out": str(tmp_path / "out"), "seeds": [0, 1], "prompts": ["p"]}
    (tmp_path / "table.yaml").write_text(yaml.safe_dump(content | {"arms": arms}, sort_keys=False))
    return table.Table.load(tmp_path / "table.yaml")


def _acceptance(off: float, on: float | None) -> dict[str, Any]:
    arms = {"relay_off": off} | ({} if on is None else {"relay_on": on})
    one = {arm: {"tau": value, "by_depth": [0.5, 0.25]} for arm, value in arms.items()}
    return {"sets": {"p": one}, "mean": one}


def test_finished_runs_are_skipped_and_starts_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a table that trains again what it has, loses what it has, or trains an arm before its start."""
    trained: list[tuple[str, int]] = []
    too_early = threading.Event()

    def train(_table: table.Table, arm: str, seed: int) -> float:
        if arm == "start" and seed == 1:
            too_early.wait(1.0)  # gives an arm that does not wait for its start the time to be first
        trained.append((arm, seed))
        if arm != "start" and seed == 1:
            too_early.set()
        return 1.0

    monkeypatch.setattr(table, "train", train)
    monkeypatch.setattr(table, "measure", lambda t, arm, seed, temperature: _acceptance(2.0, 2.2))
    lab = _table(tmp_path)
    assert lab.recipe_fields("dflow", 1)["init_from"] == str(tmp_path / "out" / "start.1" / "last")
    assert table.run(lab, ["dflash"], [0], 1) == []
    assert trained == [("start", 0), ("dflash", 0)]
    trained.clear()
    assert table.run(lab, list(lab.arms), [0, 1], 2) == []
    assert trained.index(("start", 1)) < min(trained.index(("dflash", 1)), trained.index(("dflow", 1)))
    assert sorted(trained) == [("dflash", 1), ("dflow", 0), ("dflow", 1), ("start", 1)]
    assert len(table.read_records(lab.out / "table.jsonl")) == 6


def test_a_failed_run_is_reported_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a failure that is swallowed, or that ends the whole table."""

    def train(_table: table.Table, arm: str, _seed: int) -> float:
        if arm == "dflash":
            raise RuntimeError("no room")
        return 1.0

    monkeypatch.setattr(table, "train", train)
    monkeypatch.setattr(table, "measure", lambda *_: _acceptance(2.0, None))
    lab = _table(tmp_path)
    assert table.run(lab, list(lab.arms), [0], 1) == ["dflash, seed 0: no room"]
    assert {record["arm"] for record in table.read_records(lab.out / "table.jsonl")} == {"start", "dflow"}


def test_a_run_of_other_settings_is_refused(tmp_path: Path) -> None:
    """Catches a trainer that resumes a checkpoint of another recipe under a new name."""
    lab = _table(tmp_path)
    folder = lab.run_dir("dflash", 0)
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(lab.recipe_fields("dflash", 0) | {"steps": 6}))
    with pytest.raises(RuntimeError, match=r"other settings \(steps\)"):
        table.train(lab, "dflash", 0)


def test_ratios_are_paired_by_seed(tmp_path: Path) -> None:
    """Catches ratios against another seed's control, and a relay row that shows the masks-only values."""
    records = [
        {"arm": arm, "seed": seed, "minutes": 1.0, "acceptance": {"0": _acceptance(off, on)}}
        for arm, seed, off, on in [
            ("dflash", 0, 2.0, None), ("dflash", 1, 4.0, None), ("dflow", 0, 2.2, 3.0), ("dflow", 1, 4.0, 6.0),
        ]
    ]  # fmt: skip
    printed = table.markdown(records, ["dflash", "dflow"])
    assert "| dflow, relay | 2 | 1.0 | 4.500 ± 2.121 | 1.500 ± 0.000 | .50 .25 |" in printed
    assert "| dflow, masks only | 2 | 1.0 | 3.100 ± 1.273 | 1.050 ± 0.071 | .50 .25 |" in printed
    gains = [(p.own_tau, round(p.gain, 4)) for p in plot.points(records) if p.set == "mean"]
    assert gains == [(2.2, 1.3636), (4.0, 1.5)]


def test_the_committed_table_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an arm whose recipe the trainer would refuse, and arms that train on different numbers of blocks."""
    monkeypatch.chdir(Path(__file__).parents[2])
    lab = table.Table.load(Path("benchmarks/lab/table.yaml"))
    blocks = {}
    for name, arm in lab.arms.items():
        recipe = table.Recipe.from_dict(lab.recipe_fields(name, 0))
        rounds = recipe.rounds * recipe.relayed_anchors if recipe.has_rounds else 0
        if arm.reported:
            blocks[name] = (recipe.anchors + rounds) * recipe.sequences * recipe.steps
    assert len(set(blocks.values())) == 1, blocks


def test_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Catches a resumed run that differs from one that was never interrupted."""
    documents = [d for d in _documents(tmp_path) if d.text] * 40
    tokenizer = make_target.make_tokenizer(documents, 300)
    args = argparse.Namespace(
        seed=0, hidden=64, intermediate=64, layers=1, micro_tokens=256, batch_tokens=512, minutes=1.0,
        learning_rate=1e-3,
    )  # fmt: skip
    rows = make_target.encode(documents, tokenizer)

    def fresh() -> make_target.Training:
        return make_target.Training(make_target.make_model(tokenizer, args), rows, args, lambda _: None)

    whole = fresh()
    losses = [whole.train_step()[0] for _ in range(4)]
    first = fresh()
    assert [first.train_step()[0] for _ in range(2)] == losses[:2]
    first.save(tmp_path / "checkpoint.pt")
    second = fresh()
    second.resume(tmp_path / "checkpoint.pt")
    assert [second.train_step()[0] for _ in range(2)] == losses[2:]
    for mine, other in zip(second.model.parameters(), whole.model.parameters()):
        assert torch.equal(mine, other)
