"""`sglang-dflow train RECIPE.yaml`, from a target's checkpoint directory to a run folder, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from sglang_dflow.training.recipe import METHODS
from tests.support.tiny_training import make_workplace, write_recipe


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workplace(tmp_path_factory.mktemp("train"))


@pytest.mark.parametrize("method", METHODS)
def test_run_folder(workplace: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method, from the command's entry: checkpoint of the right family, log, versions, curves."""
    from sglang_dflow.training.trainer import main

    recipe = write_recipe(workplace, method, method=method)
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
    assert {"git_commit", "torch", "transformers", "machine"} <= set(
        json.loads((run_dir / "versions.json").read_text())
    )
    assert yaml.safe_load((run_dir / "recipe.yaml").read_text())["method"] == method
