"""states.py and the data set on top of it: shard layout, mapping, and states that are computed instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from sglang_dflow.training import states as states_module
from sglang_dflow.training.data import Answer
from sglang_dflow.training.dataset import collate, load_sequences, split_held_out
from sglang_dflow.training.states import StateStore, StateWriter, capture_each, check_room, states_dir
from sglang_dflow.training.target import causal_attend
from tests.unit.training_toys import toy_samples, toy_target

LAYERS = [0, 2]


def _rows(count: int, value: float) -> torch.Tensor:
    return torch.full((count, 6), value)


def test_shard_layout(tmp_path: Path) -> None:
    """Catches another layout than the documented one, which other tools read."""
    writer = StateWriter(tmp_path / "a.states", LAYERS, "toy")
    writer.write(["x", "y"], [_rows(2, 1.0), _rows(3, 2.0)])
    writer.write(["z"], [_rows(4, 3.0)])
    assert sorted(p.name for p in (tmp_path / "a.states").iterdir()) == ["00000.safetensors", "00001.safetensors"]
    with safe_open(tmp_path / "a.states" / "00001.safetensors", "pt") as file:
        metadata = file.metadata()
        assert torch.equal(file.get_tensor("states"), _rows(4, 3.0).bfloat16())
    assert metadata == {
        "ids": '["z"]', "rows": "[4]", "first_row": "5", "target_layer_ids": "[0, 2]", "target": "toy",
    }  # fmt: skip


def test_states_are_found_by_id_and_the_newest_shard_wins(tmp_path: Path) -> None:
    """Catches states of a neighbour, and a batch that was cut off before its lines and answered again otherwise."""
    directory = tmp_path / "a.states"
    StateWriter(directory, LAYERS, "toy").write(["x", "y"], [_rows(2, 1.0), _rows(3, 2.0)])
    (directory / "00001.part").write_text("torn")
    StateWriter(directory, LAYERS, "toy").write(["y"], [_rows(5, 7.0)])
    assert not list(directory.glob("*.part"))
    store = StateStore(directory, 6, LAYERS)
    x, y = store.get("x", 2), store.get("y", 5)
    assert x is not None and torch.equal(x, _rows(2, 1.0).bfloat16())
    assert y is not None and torch.equal(y, _rows(5, 7.0).bfloat16())
    assert store.get("nobody", 3) is None
    with pytest.raises(ValueError, match="have 2 rows, its answer has 4"):
        store.get("x", 4)


def test_wrong_states_are_refused(tmp_path: Path) -> None:
    """Catches training on states of other layers, which have the same width and look alike."""
    StateWriter(tmp_path, LAYERS, "toy").write(["x"], [_rows(2, 1.0)])
    with pytest.raises(ValueError, match=r"layers \[0, 2\], expected \[1, 2\]"):
        StateStore(tmp_path, 6, [1, 2])
    with pytest.raises(ValueError, match=r"layers \[0, 2\], expected \[1, 2\]"):
        StateWriter(tmp_path, [1, 2], "toy")
    with pytest.raises(ValueError, match="states of 6 values, expected 8"):
        StateStore(tmp_path, 8)


def test_stored_states_are_views_of_the_file(tmp_path: Path) -> None:
    """Catches a copy of a shard for each conversation: 200 conversations of one shard share one mapping."""
    StateWriter(tmp_path, LAYERS, "toy").write([str(i) for i in range(200)], [_rows(3, float(i)) for i in range(200)])
    store = StateStore(tmp_path, 6)
    views = [store.get(str(i), 3) for i in range(200)]
    first = views[0]
    assert first is not None
    for i, view in enumerate(views):
        assert view is not None and view.data_ptr() == first.data_ptr() + i * 3 * 6 * 2
    maps = Path("/proc/self/maps")
    if maps.exists():
        start = first.data_ptr()
        ranges = [line.split()[0].split("-") + [line] for line in maps.read_text().splitlines()]
        assert any(int(low, 16) <= start < int(high, 16) and "00000.safetensors" in line for low, high, line in ranges)


def test_too_little_room_is_refused(tmp_path: Path) -> None:
    """Catches a run that fills the disk and only then fails."""
    check_room(tmp_path / "not" / "yet", 1)
    with pytest.raises(RuntimeError, match=r"need up to 1000000000\.00 GB.*--no-states"):
        check_room(tmp_path / "not" / "yet", 10**18)


def test_computed_states_do_not_depend_on_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches padding that reaches a sequence's rows, and sequences handed back in another order."""
    target = toy_target()
    sequences = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12], [13, 14, 15, 16]]
    passes: list[int] = []
    capture = states_module.capture_states

    def counted(target, tokens):  # type: ignore[no-untyped-def]
        passes.append(tokens.numel())
        return capture(target, tokens)

    monkeypatch.setattr(states_module, "capture_states", counted)
    for sequence, states in zip(sequences, capture_each(target, sequences, batch_rows=12)):
        ids = torch.tensor([sequence])
        alone = target.forward(ids, torch.arange(len(sequence))[None], causal_attend(target.shape), capture=True)
        assert alone.captured is not None and torch.allclose(states, alone.captured[0], atol=1e-5)
    assert len(passes) == 2 and max(passes) <= 12
    weight = torch.ones(2, 32, requires_grad=True)
    torch.nn.functional.linear(states, weight).sum().backward()  # a drafter can learn from them
    assert weight.grad is not None and not states.requires_grad


def _answers_file(path: Path) -> list[Answer]:
    samples = toy_samples(toy_target(), 5)
    answers = []
    for sample in samples:
        tokens = sample.tokens.tolist()
        answers.append(Answer(sample.id, "toy", tokens[: sample.prompt_len], tokens[sample.prompt_len :], "length"))
    path.write_text("".join(json.dumps(answer._asdict()) + "\n" for answer in answers))
    writer = StateWriter(states_dir(path), LAYERS, "toy")
    for part in (samples[:2], samples[2:]):
        writer.write([s.id for s in part], [s.states for s in part if s.states is not None])
    return answers


def test_the_data_set_serves_stored_and_computed_states_alike(tmp_path: Path) -> None:
    """Catches states that are shifted against the tokens, in the store or on the fly."""
    path = tmp_path / "answers.jsonl"
    _answers_file(path)
    target, features = toy_target(), 32
    stored = load_sequences([path], features, target_layer_ids=LAYERS)
    assert [s.states is not None for s in stored] == [True] * 5
    expected = collate(stored, [3, 0, 4], block_size=4)
    assert torch.equal(expected.captured[1, : len(stored[0].tokens) - 1], toy_samples(target, 1)[0].states.bfloat16())
    for shard in list(states_dir(path).iterdir())[:1]:
        shard.unlink()
    for s in (load_sequences([path], features), [sample._replace(states=None) for sample in stored]):
        assert any(sample.states is None for sample in s)
        got = collate(s, [3, 0, 4], 4, target)
        # bf16 of float32 values that differ in their last bits
        assert torch.allclose(got.captured.float(), expected.captured.float(), rtol=1e-2, atol=1e-5)
        assert torch.equal(got.tokens, expected.tokens) and not got.captured.requires_grad
    with pytest.raises(ValueError, match="no stored states"):
        collate([sample._replace(states=None) for sample in stored], [0], 4)


def test_turns_and_samples_of_a_conversation_are_held_out_together() -> None:
    """Catches a held-out conversation whose second turn, with the first one inside, is trained on."""
    sample = toy_samples(toy_target(), 1)[0]
    names = [f"c/{i}{ending}" for i in range(40) for ending in ("", "#s0t1", "#s1t0", "#s12t3")]
    train, held = split_held_out([sample._replace(id=name) for name in names], 4)
    sides = ({s.id.split("#")[0] for s in train}, {s.id.split("#")[0] for s in held})
    assert sides[0] and sides[1] and not sides[0] & sides[1]
    assert len(train) + len(held) == len(names)
