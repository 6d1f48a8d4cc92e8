"""`sglang-dflow train RECIPE.yaml`, from a target's checkpoint directory to a run folder: one process and two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from sglang_dflow.training.drafter import Drafter
from sglang_dflow.training.recipe import METHODS


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 target and twelve conversations without stored states."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("train")
    config = Qwen3Config(
        hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, vocab_size=40, max_position_embeddings=128, tie_word_embeddings=True, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder / "target")
    with (folder / "answers.jsonl").open("w") as out:
        for index in range(12):
            generator = torch.Generator().manual_seed(index)
            tokens = torch.randint(3, 40, (24 + index,), generator=generator).tolist()
            answer = {"id": f"toy/{index}", "domain": "toy", "prompt_ids": tokens[:5], "answer_ids": tokens[5:]}
            out.write(json.dumps(answer | {"finish": "length"}) + "\n")
    return folder


def _recipe(folder: Path, name: str, **fields: object) -> Path:
    recipe = {
        "target": str(folder / "target"), "answers": [str(folder / "answers.jsonl")], "run_dir": str(folder / name),
        "num_layers": 2, "source_layers": [2, 3], "target_layer_ids": [0, 2], "block_size": 4, "mask_token_id": 1,
        "relay_hidden_size": 8, "gru_hidden_dim": 4, "emb_dim": 4, "sequences": 2, "anchors": 4, "relayed_anchors": 2,
        "rollout_anchors": 6, "rollout_sequences": 8, "steps": 4, "warmup_steps": 1, "frequent_tokens": 20,
        "negatives": 5, "held_out": 4, "eval_steps": 2, "log_steps": 1, "checkpoint_steps": 2, "threads": 1,
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe | fields))
    return path


def _train(recipe: Path, *options: str, processes: int) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*launcher, "-m", "sglang_dflow.training.trainer", str(recipe), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("method", METHODS)
def test_run_folder(workplace: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method, from the command's entry: checkpoint of the right family, log, versions, curves."""
    from sglang_dflow.training.trainer import main

    recipe = _recipe(workplace, method, method=method)
    threads = torch.get_num_threads()
    try:
        assert main([str(recipe)]) == 0
    finally:
        torch.set_num_threads(threads)
        torch.set_default_device("cpu")
    run_dir = workplace / method
    config = json.loads((run_dir / "last" / "config.json").read_text())
    relay, domino = method in ("dflow", "domino-dflow"), method.startswith("domino")
    assert config["architectures"] == ["DFlowDraftModel" if relay else "DFlashDraftModel"]
    assert (config["dflash_config"].get("projector_type") == "domino") == domino
    records = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    rounds = max(len(record["losses"]) for record in records if "losses" in record)
    assert rounds == (1 if method in ("dflash", "domino") else 3)
    held_out = [record["held_out"] for record in records if "held_out" in record]
    assert set(held_out[-1]) == ({"masks", "relay"} if relay else {"masks"})
    assert {"git", "torch", "transformers", "machine"} <= set(json.loads((run_dir / "versions.json").read_text()))
    assert yaml.safe_load((run_dir / "recipe.yaml").read_text())["method"] == method


def test_two_processes_resume_exactly(workplace: Path) -> None:
    """Catches gradients that are not averaged over processes, rollouts that one process does not see, and a resume that
    goes on from another place: 3 steps and then the rest give the weights of one go."""
    straight, parts = (_recipe(workplace, name, method="dflow") for name in ("straight", "parts"))
    _train(straight, processes=2)
    assert "resumed" not in _train(parts, "--stop-at", "3", processes=2)
    assert torch.load(workplace / "parts" / "checkpoint.pt", weights_only=True)["step"] == 3
    assert "resumed at step 3" in _train(parts, processes=2)
    weights = [Drafter.load(workplace / name / "last").state_dict() for name in ("straight", "parts")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
