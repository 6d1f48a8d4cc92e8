"""`sglang-dflow train RECIPE.yaml`, from a target's checkpoint directory to a run folder, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from sglang_dflow.inspect_checkpoint import inspect_checkpoint
from sglang_dflow.training import rescore
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


def test_rescore(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a trained drafter to one that serves with a rescorer; a run that goes on from it leaves the rescorer out."""
    from sglang_dflow.training.trainer import main as train

    threads, stale = torch.get_num_threads(), {"method": "dflow", "relay_stale_token": True}
    answers, out = workplace / "answers.jsonl", workplace / "rescored"
    try:
        assert train([str(write_recipe(workplace, "stale", **stale))]) == 0
        drafter = workplace / "stale" / "last"
        command = ["--target", str(workplace / "target"), "--drafter", str(drafter), "--answers", str(answers)]
        options = ["--out", str(out), "--held-out", "3", "--epochs", "2", "--size", "8", "--device", "cpu"]
        examples = ["--examples", str(workplace / "rounds.safetensors")]
        assert rescore.main([*command, *options, *examples]) == 0
        record = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert record["fitted_on"]["rounds"] > record["held_out"]["rounds"] > 0
        found = inspect_checkpoint(out, workplace / "target")
        assert found.serves and found.relay is not None and found.relay["relay_rescore_size"] == 8
        assert rescore.main([*command, *options, *examples]) == 1
        assert "not an empty directory" in capsys.readouterr().err
        again = ["--out", str(workplace / "again"), *options[2:], "--seed", "1"]
        assert rescore.main([*command, *again, *examples]) == 1
        assert "holds the rounds of" in capsys.readouterr().err
        assert train([str(write_recipe(workplace, "further", init_from=str(out), **stale))]) == 0
    finally:
        torch.set_num_threads(threads)
        torch.set_default_device("cpu")
    assert "relay_rescore_size" not in json.loads((workplace / "further/last/config.json").read_text())["dflow_config"]


def test_rescore_refuses_a_plain_drafter(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sglang_dflow.training.trainer import main as train

    threads = torch.get_num_threads()
    try:
        assert train([str(write_recipe(workplace, "plain", method="dflash"))]) == 0
        command = ["--target", str(workplace / "target"), "--drafter", str(workplace / "plain/last")]
        more = ["--answers", str(workplace / "answers.jsonl"), "--out", str(workplace / "none"), "--device", "cpu"]
        assert rescore.main([*command, *more]) == 1
    finally:
        torch.set_num_threads(threads)
        torch.set_default_device("cpu")
    assert "expected a relay with the stale token and the plain head" in capsys.readouterr().err
    assert not list((workplace / "none").iterdir())
