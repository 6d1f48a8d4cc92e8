"""`sglang-dflow inspect`: what is reported, and the verdict for every kind of broken checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflow.checkpoint_files import locate, tensor_headers
from sglang_dflow.inspect_checkpoint import Part, inspect_checkpoint, main
from sglang_dflow.training.drafter import Drafter, DrafterConfig

Tensors = dict[str, torch.Tensor]
SIZES = (16, 32, 2, 2, 1, 8, 50, 1e-5, 1e4, 64, 4, 4, 3, (0, 2))  # hidden 16, 2 layers, block 4, captured 0 and 2


def _domino(config: dict[str, Any], tensors: Tensors) -> None:
    config["dflash_config"] |= {
        "projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 1, "gru_hidden_dim": 6, "emb_dim": 5,
    }  # fmt: skip
    tensors |= {
        "prefix_gru.weight_ih_l0": torch.ones(18, 16), "prefix_gru.weight_hh_l0": torch.ones(18, 6),
        "embed_proj.0.weight": torch.ones(5, 22), "embed_proj.2.weight": torch.ones(50, 5),
    }  # fmt: skip


def _edit(directory: Path, edit: Callable[[dict[str, Any], Tensors], None]) -> Path:
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    edit(config, tensors)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def dflow(tmp_path: Path) -> Path:
    """A small DFlow checkpoint with a zero relay of width 7, in bf16."""
    Drafter(DrafterConfig(*SIZES, relay_source="suffix", relay_hidden_size=7)).save(tmp_path / "dflow")
    return tmp_path / "dflow"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A target's config that the small drafter fits."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "vocab_size": 50,
        "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32,
    }  # fmt: skip
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text(json.dumps(config))
    return tmp_path / "target"


def test_reports_family_fields_relay_and_sizes(dflow: Path) -> None:
    """Catches sizes in the wrong part and a zero relay taken for a trained one."""
    found = inspect_checkpoint(dflow)
    assert (found.family, found.problems, found.serves) == ("DFlash", (), True)
    assert found.fields["block_size"] == 4 and found.fields["target_layer_ids"] == [0, 2]
    assert found.fields["mask_token_id"] == 3
    assert found.relay is not None
    assert (found.relay["relay_source"], found.relay["relay_hidden_size"]) == ("suffix", 7)
    assert found.relay["last_layer"] == "zero"
    # fc 16 x 32 and hidden_norm 16; relay 2 * 16, 7 * 48 + 7, 32 * 7 + 32
    assert found.parts["context projection"] == Part(528, 1056, "BF16")
    assert found.parts["relay"] == Part(32 + 343 + 256, 2 * (32 + 343 + 256), "BF16")
    total = sum(tensor.numel() for tensor in load_file(dflow / "model.safetensors").values())
    assert sum(part.parameters for part in found.parts.values()) == total
    assert list(found.parts) == ["layers", "context projection", "relay", "final norm"]


def test_a_trained_relay_is_told(dflow: Path) -> None:
    def train(config: dict[str, Any], tensors: Tensors) -> None:
        tensors["relay_mlp.2.bias"] = torch.full((32,), 2.0)

    found = inspect_checkpoint(_edit(dflow, train))
    assert found.relay is not None and found.relay["last_layer"] == "trained"
    assert found.relay["last_layer_rms"] == pytest.approx((32 * 4.0 / 256) ** 0.5)


def test_domino_and_dflash2(dflow: Path) -> None:
    """Catches heads that are not recognised, and a Domino head whose tensors do not fit its config."""
    found = inspect_checkpoint(_edit(dflow, _domino))
    assert (found.family, found.problems) == ("Domino", ())
    assert found.parts["Domino head"].parameters == 18 * 16 + 18 * 6 + 5 * 22 + 50 * 5
    _edit(dflow, lambda config, tensors: config["dflash_config"].update(emb_dim=4))
    assert [p.split(" has")[0] for p in inspect_checkpoint(dflow).problems] == [
        "tensor embed_proj.0.weight", "tensor embed_proj.2.weight",
    ]  # fmt: skip

    def selector(config: dict[str, Any], tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(("prefix_gru.", "embed_proj."))]:
            del tensors[name]
        config["dflash_config"] = {"target_layer_ids": [0, 2], "mask_token_id": 3, "selector_rank": 2}
        config["architectures"] = ["DFlow2DraftModel"]
        tensors["candidate_selector.state.weight"] = torch.ones(2, 16)

    found = inspect_checkpoint(_edit(dflow, selector))
    assert (found.family, found.problems) == ("DFlash2", ())
    assert found.parts["DFlash2 selector"].parameters == 32


def _drop(name: str) -> Callable[[dict[str, Any], Tensors], None]:
    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        for holder in (config, config["dflash_config"], config["dflow_config"], tensors):
            holder.pop(name, None)

    return edit


def _plain(config: dict[str, Any], tensors: Tensors) -> None:
    del config["dflow_config"]
    config["architectures"] = ["DFlashDraftModel"]


def _no_layer(config: dict[str, Any], tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("layers.1.")]:
        del tensors[name]


def _stray_head(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["prefix_gru.weight_hh_l0"] = torch.ones(18, 6)


def _other_fc(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["fc.weight"] = torch.ones(16, 48)


BROKEN: dict[str, tuple[Callable[[dict[str, Any], Tensors], None], str]] = {
    "plain DFlash": (_plain, "plain DFlash checkpoint.*sglang-dflow convert"),
    "relay tensor": (_drop("relay_norm.bias"), "relay_norm.bias is missing"),
    "relay field": (_drop("relay_source"), "relay_source is missing"),
    "captured layers": (_drop("target_layer_ids"), "target_layer_ids is missing"),
    "context projection": (_other_fc, r"fc.weight has shape \(16, 48\), expected \(16, 32\)"),
    "no context projection": (_drop("fc.weight"), r"fc.weight is missing, expected shape \(16, 32\)"),
    "layer": (_no_layer, r"no tensors of layers \[1\], but num_hidden_layers is 2"),
    "stray head": (_stray_head, "projector_type is not 'domino'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoints_do_not_serve(dflow: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each fault is found, alone, by both outputs, with exit status 1."""
    edit, words = BROKEN[name]
    _edit(dflow, edit)
    assert main([str(dflow)]) == 1
    text = capsys.readouterr().out
    assert "serves with DFLOW: no" in text
    assert main([str(dflow), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["serves"] is False and len(record["problems"]) == 1
    assert re.search(words, record["problems"][0]) and record["problems"][0] in text


def test_target_is_checked_when_named(dflow: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(dflow)]) == 0
    assert "yes; the target was not checked" in capsys.readouterr().out
    assert main([str(dflow), "--target", str(target)]) == 0
    assert "serves with DFLOW: yes\n" in capsys.readouterr().out
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"hidden_size": 32, "vocab_size": 60}))
    assert main([str(dflow), "--target", str(target)]) == 1
    out = capsys.readouterr().out
    assert "hidden_size is 16, but the target's is 32" in out and "vocab_size is 50, but the target's is 60" in out
    assert main([str(dflow), "--target", "/nowhere/x"]) == 1
    assert "target /nowhere/x has no readable configuration" in capsys.readouterr().err


def test_headers_of_shards(dflow: Path) -> None:
    """Catches a sharded checkpoint of which only one file is seen, and a shard that is missing."""
    whole = {name: (header.shape, header.dtype) for name, header in tensor_headers(dflow).items()}
    shard(dflow)
    assert {name: (header.shape, header.dtype) for name, header in tensor_headers(dflow).items()} == whole
    assert inspect_checkpoint(dflow).serves
    (dflow / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks \['model-00002-of-00002.safetensors'\]"):
        tensor_headers(dflow)


def shard(directory: Path) -> None:
    """Split a checkpoint's one file into two shards with an index."""
    tensors = load_file(directory / "model.safetensors")
    weight_map = {}
    for number in (1, 2):
        file = f"model-0000{number}-of-00002.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[number - 1 :: 2]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").unlink()


def test_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "missing/dir/x")]) == 1
    assert "is not a directory; expected a checkpoint directory or a hub id" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 1
    assert "holds no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert main([str(tmp_path)]) == 1
    assert "is not JSON" in capsys.readouterr().err


def test_hub_ids(dflow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id is downloaded; a hub that cannot be reached is told, with a remedy."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(dflow))
    assert locate("z-lab/Qwen3-4B-DFlash-b16") == dflow

    def offline(name: str, allow_patterns: list[str]) -> str:
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"not a directory here, and the hub .*\(no route\).*name its directory"):
        locate("z-lab/Qwen3-4B-DFlash-b16")
