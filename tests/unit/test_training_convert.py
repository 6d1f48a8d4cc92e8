"""Conversion between DFlash and DFlow checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflow.demo import DEMO_DRAFTER
from sglang_dflow.inspect_checkpoint import inspect_checkpoint
from sglang_dflow.training.convert import convert_dflash_to_dflow, main, strip_relay
from sglang_dflow.training.drafter import Drafter, DrafterConfig
from tests.unit.test_inspect_checkpoint import shard


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


def _with_head(dflash: Path, architecture: str, fields: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
    config = json.loads((dflash / "config.json").read_text())
    config["architectures"] = [architecture]
    config["dflash_config"] |= fields
    (dflash / "config.json").write_text(json.dumps(config))
    save_file(load_file(dflash / "model.safetensors") | tensors, dflash / "model.safetensors")


DOMINO = {
    "projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 1, "gru_hidden_dim": 6, "emb_dim": 5,
}  # fmt: skip


def _domino_tensors() -> dict[str, torch.Tensor]:
    shapes = {"prefix_gru.weight_ih_l0": (18, 16), "prefix_gru.weight_hh_l0": (18, 6), "embed_proj.0.weight": (5, 22)}
    return {name: torch.randn(shape) for name, shape in shapes.items()} | {"embed_proj.2.weight": torch.randn(50, 5)}


HEADS = {
    "Domino": ("DFlashDraftModel", "DFlowDraftModel", DOMINO, _domino_tensors()),
    "DFlash2": (
        "DFlash2DraftModel", "DFlow2DraftModel", {"selector_rank": 2, "selector_top_k": 4},
        {"candidate_selector.state.weight": torch.randn(2, 16).half()},
    ),
}  # fmt: skip


def _bytes(directory: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {
        name: (tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
def test_heads_and_shards_survive_the_round_trip(dflash: Path, tmp_path: Path, head: str, sharded: bool) -> None:
    """Catches a head that is dropped or cast, shards of which one is lost, and an index that names files no more."""
    before, after, fields, tensors = HEADS[head]
    _with_head(dflash, before, fields, tensors)
    if sharded:
        shard(dflash)
    original, config = _bytes(dflash), json.loads((dflash / "config.json").read_text())
    assert original.keys() >= tensors.keys()
    dflow = convert_dflash_to_dflow(dflash, tmp_path / "dflow")
    found = inspect_checkpoint(dflow)
    assert (found.family, found.problems, found.fields["architectures"]) == (head, (), [after])
    assert original.items() <= _bytes(dflow).items()
    assert [file.name for file in dflow.glob("*safetensors*")] == ["model.safetensors"]
    back = strip_relay(dflow, tmp_path / "back")
    assert _bytes(back) == original
    assert json.loads((back / "config.json").read_text()) == config


def test_stale_token_widens_the_first_layer(dflash: Path, tmp_path: Path) -> None:
    """Catches a field without the tensor that belongs to it."""
    assert main([str(dflash), str(tmp_path / "a"), "--relay-stale-token"]) == 0
    assert load_file(tmp_path / "a/model.safetensors")["relay_mlp.0.weight"].shape == (16, 64)
    assert json.loads((tmp_path / "a/config.json").read_text())["dflow_config"]["relay_stale_token"] is True


def test_errors_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing source, and a directory without weights, end in one line and exit status 1."""
    assert main([str(tmp_path / "nothing/at/all"), str(tmp_path / "x")]) == 1
    assert "expected a checkpoint directory or a hub id" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    shutil.copy(DEMO_DRAFTER / "config.json", tmp_path / "empty")
    assert main([str(tmp_path / "empty"), str(tmp_path / "x"), "--strip"]) == 1
    assert "holds neither model.safetensors nor" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
