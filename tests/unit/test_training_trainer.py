"""The trainer on a toy: exact resume, schedule, learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sglang_dflow.training.dataset import Sample, epoch_batches, split_held_out
from sglang_dflow.training.recipe import METHODS, Recipe
from sglang_dflow.training.trainer import Trainer, learning_rate_factor
from tests.unit.training_toys import toy_samples, toy_target


def _recipe(run_dir: Path, **fields: Any) -> Recipe:
    run_dir.mkdir(exist_ok=True)
    settings: dict[str, Any] = {
        "target": "", "answers": [], "run_dir": str(run_dir), "num_layers": 2, "source_layers": [2, 3],
        "target_layer_ids": [0, 2], "block_size": 4, "mask_token_id": 1, "sequences": 2, "anchors": 3,
        "relayed_anchors": 3, "rollout_anchors": 6, "rollout_sequences": 8, "relay_hidden_size": 8, "steps": 6,
        "gru_hidden_dim": 4, "emb_dim": 4,
        "warmup_steps": 1, "frequent_tokens": 20, "negatives": 5, "held_out": 3, "eval_steps": 100,
        "checkpoint_steps": 100,
    }  # fmt: skip
    return Recipe(**(settings | fields))


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Toy conversations with bf16 states, as the states files hold them."""
    return [s._replace(states=s.states.bfloat16()) for s in toy_samples(toy_target(), 8)]


def _silent(_line: str) -> None:
    return None


@pytest.mark.parametrize("method", METHODS)
def test_resume_is_exact(tmp_path: Path, samples: list[Sample], method: str) -> None:
    """Catches a checkpoint that forgets optimiser state, data position, random state or rollouts."""
    recipe = _recipe(tmp_path / "a", method=method, relay_stale_token=True)
    straight = Trainer(recipe, toy_target(), samples, _silent)
    straight.run()
    first = Trainer(_recipe(tmp_path / "b", method=method, relay_stale_token=True), toy_target(), samples, _silent)
    if recipe.has_rounds:
        first.refresh_rollouts()
    for _ in range(3):
        first.train_step()
    first.save_checkpoint()
    second = Trainer(_recipe(tmp_path / "b", method=method, relay_stale_token=True), toy_target(), samples, _silent)
    assert second.resume() and second.step == 3
    second.run()
    for (name, expected), actual in zip(straight.drafter.state_dict().items(), second.drafter.state_dict().values()):
        assert torch.equal(expected, actual), name


def test_relay_only_moves_the_relay_and_nothing_else(tmp_path: Path, samples: list[Sample]) -> None:
    """Catches decay or steps of frozen weights, and a relay that does not learn alone."""
    start = Trainer(_recipe(tmp_path / "s", method="dflash"), toy_target(), samples, _silent)
    start.drafter.save(tmp_path / "start")
    recipe = _recipe(tmp_path / "o", method="dflow", relay_only=True, init_from=str(tmp_path / "start"), steps=20)
    trainer = Trainer(recipe, toy_target(), samples, _silent)
    before = {name: value.clone() for name, value in trainer.drafter.state_dict().items()}
    trainer.refresh_rollouts()
    results = [trainer.train_step() for _ in range(20)]
    changed = {name for name, value in trainer.drafter.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(name.startswith("relay.") for name in changed)
    first, last = (sum(sum(result.losses) for result in part) for part in (results[:5], results[-5:]))
    assert last < first


def test_relay_only_without_a_drafter_is_refused() -> None:
    fields = {"target": "", "answers": [], "run_dir": "", "method": "dflow", "relay_only": True}
    with pytest.raises(ValueError, match="relay_only needs method dflow or domino-dflow, and init_from"):
        Recipe.from_dict(fields)


def test_interrupted_rollouts_go_on(tmp_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches hours of rollouts that are made again, or are taken over from a run with other settings."""
    monkeypatch.setattr("sglang_dflow.training.rollout_store.SHARD_SEQUENCES", 2)
    recipe, lines = _recipe(tmp_path / "r", method="dflow", relay_stale_token=True), list[str]()
    whole = Trainer(recipe, toy_target(), samples, _silent)
    whole.refresh_rollouts()
    assert whole.rollouts is not None and len(whole.rollouts.sequences) > 2
    expected = {sequence: whole.rollouts.get(sequence, 0) for sequence in whole.rollouts.sequences}
    first, *lost = sorted(whole.rollouts.folder.glob("*.safetensors"))
    of_two_processes = first.with_name("1-00000.safetensors")
    save_file({"sequences": torch.tensor([0])}, of_two_processes, metadata={"processes": "2"})
    for path in lost:
        path.unlink()
    kept = first.stat()

    again = Trainer(recipe, toy_target(), samples, lines.append)
    again.refresh_rollouts()
    assert "rollout: goes on behind 2 sequences of an interrupted run" in lines
    assert first.stat().st_mtime_ns == kept.st_mtime_ns and not of_two_processes.exists()
    assert again.rollouts is not None and again.rollouts.sequences == whole.rollouts.sequences
    for sequence, relayed in expected.items():
        for one, other in zip(relayed, again.rollouts.get(sequence, 0), strict=True):
            assert torch.equal(one, other)

    other_seed = Trainer(
        _recipe(tmp_path / "r", method="dflow", relay_stale_token=True, seed=1), toy_target(), samples, _silent
    )
    other_seed.refresh_rollouts()
    assert first.stat().st_mtime_ns != kept.st_mtime_ns


def test_training_lowers_the_loss(tmp_path: Path, samples: list[Sample]) -> None:
    """Catches a gradient that never reaches the drafter, and a relay that never learns."""
    trainer = Trainer(_recipe(tmp_path / "c", method="dflow", steps=30, held_out=1000), toy_target(), samples, _silent)
    trainer.refresh_rollouts()
    results = [trainer.train_step() for _ in range(30)]
    for number in range(3):
        losses = [result.losses[number] for result in results if number < len(result.losses)]
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert trainer.drafter.relay is not None
    assert trainer.drafter.relay.relay_mlp[2].weight.abs().max() > 0


@pytest.mark.parametrize("method", ["dflow", "domino-dflow"])
def test_warm_start_keeps_moments_with_their_parameters(tmp_path: Path, samples: list[Sample], method: str) -> None:
    """Catches moments that move to other parameters when a relay or a head adds some."""
    first = Trainer(_recipe(tmp_path / "f", method="dflash"), toy_target(), samples, _silent)
    first.train_step()
    first.save_checkpoint()
    second = Trainer(_recipe(tmp_path / "g", method=method), toy_target(), samples, _silent)
    second.warm_start(tmp_path / "f" / "checkpoint.pt")
    new = dict(second.drafter.named_parameters())
    for name, parameter in first.drafter.named_parameters():
        assert torch.equal(parameter, new[name])
        moments = [trainer.optimizer.state[p] for trainer, p in ((first, parameter), (second, new[name]))]
        assert torch.equal(moments[0]["exp_avg"], moments[1]["exp_avg"]), name
    fresh = [name for name in new if name.startswith(("relay.", "domino."))]
    assert fresh and not any(second.optimizer.state.get(new[name]) for name in fresh)


def test_schedule() -> None:
    """Catches a warm-up that starts at zero for ever and a cosine that misses its ends."""
    assert learning_rate_factor(0.0, 0, 10, 0.1) == pytest.approx(0.1)
    assert learning_rate_factor(0.0, 9, 10, 0.1) == pytest.approx(1.0)
    assert learning_rate_factor(1.0, 500, 10, 0.1) == pytest.approx(0.1)
    assert learning_rate_factor(0.5, 500, 10, 0.1) == pytest.approx(0.55)


def test_epochs_cover_the_data_and_the_split_is_stable(samples: list[Sample]) -> None:
    """Catches sequences that are never seen, and held-out conversations that move into training when data is added."""
    batches = epoch_batches([5, 9, 3, 7, 8, 2], 2, seed=1, epoch=0)
    assert sorted(i for batch in batches for i in batch) == list(range(6))
    assert batches == epoch_batches([5, 9, 3, 7, 8, 2], 2, seed=1, epoch=0)
    train, held = split_held_out(samples, 3)
    fewer_train, fewer_held = split_held_out(samples[:5], 3)
    assert {s.id for s in fewer_held} <= {s.id for s in held} and {s.id for s in fewer_train} <= {s.id for s in train}
    assert not {s.id for s in train} & {s.id for s in held}


def test_recipe_reports_all_problems_at_once() -> None:
    """Catches a typo that silently trains with a default."""
    with pytest.raises(ValueError, match="unknown field 'learning_rat'.*missing field 'target'.*source_layers"):
        Recipe.from_dict({"learning_rat": 1, "answers": [], "run_dir": "x", "num_layers": 2, "source_layers": [1]})


def test_shipped_recipes_are_valid() -> None:
    """Catches a recipe that fell behind the code."""
    recipes = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
    assert recipes
    for path in recipes:
        Recipe.load(path)
