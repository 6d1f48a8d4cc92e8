"""Conversion between DFlash and DFlow checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflow.training.convert import convert_dflash_to_dflow, main, strip_relay
from sglang_dflow.training.drafter import Drafter, DrafterConfig


@pytest.fixture
def dflash(tmp_path: Path) -> Path:
    """A small DFlash checkpoint with fields and files that a conversion must carry over untouched."""
    config = DrafterConfig(16, 32, 1, 2, 1, 8, 50, 1e-5, 1e4, 64, 4, 4, 3, (0, 2))
    Drafter(config).save(tmp_path / "dflash")
    fields = json.loads((tmp_path / "dflash/config.json").read_text()) | {"some_future_field": {"kept": True}}
    (tmp_path / "dflash/config.json").write_text(json.dumps(fields))
    (tmp_path / "dflash/extra.txt").write_text("kept")
    return tmp_path / "dflash"


def test_round_trip_keeps_every_tensor_and_field(dflash: Path, tmp_path: Path) -> None:
    """Catches a conversion that changes type, value or name of anything that was there before."""
    dflow = convert_dflash_to_dflow(dflash, tmp_path / "dflow", relay_source="suffix", relay_hidden_size=5)
    back = strip_relay(dflow, tmp_path / "back")
    before, between, after = (load_file(d / "model.safetensors") for d in (dflash, dflow, back))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype == between[name].dtype
        assert torch.equal(tensor, after[name]) and torch.equal(tensor, between[name])
    old, new = (json.loads((d / "config.json").read_text()) for d in (dflash, back))
    assert old == new
    assert (dflow / "extra.txt").read_text() == "kept"


def test_converted_relay_is_zero_and_named_as_the_precedent(dflash: Path, tmp_path: Path) -> None:
    """Catches wrong tensor names or shapes, and a relay that is not silent at the start."""
    dflow = convert_dflash_to_dflow(dflash, tmp_path / "dflow", relay_hidden_size=5)
    tensors = load_file(dflow / "model.safetensors")
    shapes = {name: tuple(t.shape) for name, t in tensors.items() if name.startswith("relay_")}
    assert shapes == {
        "relay_norm.weight": (16,),
        "relay_norm.bias": (16,),
        "relay_mlp.0.weight": (5, 48),
        "relay_mlp.0.bias": (5,),
        "relay_mlp.2.weight": (32, 5),
        "relay_mlp.2.bias": (32,),
    }
    assert not tensors["relay_mlp.2.weight"].any() and not tensors["relay_mlp.2.bias"].any()
    assert tensors["relay_mlp.0.weight"].any()
    config = json.loads((dflow / "config.json").read_text())
    assert config["architectures"] == ["DFlowDraftModel"]
    assert config["dflow_config"] == {
        "relay_source": "first_rejection",
        "relay_hidden_size": 5,
        "relay_activation": "silu",
    }


def test_refusals_name_the_problem(dflash: Path, tmp_path: Path) -> None:
    """Catches a second conversion on top of the first, stripping a plain drafter, and overwriting."""
    dflow = convert_dflash_to_dflow(dflash, tmp_path / "dflow")
    with pytest.raises(ValueError, match="DFlowDraftModel"):
        convert_dflash_to_dflow(dflow, tmp_path / "twice")
    with pytest.raises(ValueError, match="expects a DFlow drafter"):
        strip_relay(dflash, tmp_path / "stripped")
    with pytest.raises(ValueError, match="not an empty directory"):
        convert_dflash_to_dflow(dflash, dflow)
    with pytest.raises(ValueError, match="relay_source"):
        convert_dflash_to_dflow(dflash, tmp_path / "bad", relay_source="nonsense")


def test_relay_tensors_without_config_are_refused(dflash: Path, tmp_path: Path) -> None:
    """Catches silently replacing a trained relay whose config lost its dflow_config."""
    tensors = load_file(dflash / "model.safetensors")
    save_file(tensors | {"relay_norm.weight": torch.ones(16)}, dflash / "model.safetensors")
    with pytest.raises(ValueError, match="already holds relay tensors"):
        convert_dflash_to_dflow(dflash, tmp_path / "dflow")


def test_command_line(dflash: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a wrong wiring of the arguments."""
    assert main([str(dflash), str(tmp_path / "a"), "--relay-hidden-size", "7"]) == 0
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--strip"]) == 0
    assert load_file(tmp_path / "a/model.safetensors")["relay_mlp.0.bias"].shape == (7,)
    assert "relay_mlp.0.bias" not in load_file(tmp_path / "b/model.safetensors")
    assert str(tmp_path / "b") in capsys.readouterr().out
