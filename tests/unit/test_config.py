"""config.py: a checkpoint is read completely, or refused with everything that is wrong with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from sglang_dflow.config import DFlowConfig, checkpoint_problems, target_problems, tensor_problems
from sglang_dflow.relay.alignment import RelayRule, RelaySource

GOOD: dict[str, Any] = {
    "architectures": ["DFlowDraftModel"],
    "hidden_size": 576,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "block_size": 8,
    "num_target_layers": 30,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 15, 28]},
    "dflow_config": {"relay_source": "suffix", "relay_hidden_size": 64, "relay_activation": "silu"},
}
TARGET = {"hidden_size": 576, "vocab_size": 49152, "num_hidden_layers": 30}


def test_reads_every_field() -> None:
    config = DFlowConfig.from_checkpoint(GOOD)
    assert config == DFlowConfig(576, 8, False, RelaySource.SUFFIX, 64, "silu", 1e-5)
    assert config.rule == RelayRule(first_offset=2, shift=0)
    assert target_problems(GOOD, **TARGET) == []


def test_fields_of_the_nested_layout() -> None:
    """block_size and shift_label may stand in dflash_config; Domino's shift changes the alignment."""
    nested = copy.deepcopy(GOOD)
    del nested["block_size"]
    nested["dflash_config"] |= {"block_size": 16, "projector_type": "domino", "shift_label": True}
    nested["dflow_config"]["relay_norm_eps"] = 1e-3
    config = DFlowConfig.from_checkpoint(nested)
    assert (config.block_size, config.shift_label, config.relay_norm_eps) == (16, True, 1e-3)
    assert config.rule.shift == 1


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(config: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for parent in parents:
            config = config[parent]
        config[last] = value

    return edit


def _drop(path: str) -> Callable[[dict[str, Any]], None]:
    def edit(config: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for parent in parents:
            config = config[parent]
        del config[last]

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_drop("dflow_config"), "plain DFlash checkpoint.*sglang-dflow convert"),
        (_set("architectures", ["DFlashDraftModel"]), "architectures is .*expected one of"),
        (_drop("dflow_config.relay_source"), "dflow_config.relay_source is missing"),
        (_set("dflow_config.relay_source", "prefix"), "'prefix', expected one of .'suffix', 'first_rejection'."),
        (_set("dflow_config.relay_hidden_size", 0), "relay_hidden_size is 0, expected a positive integer"),
        (_set("dflow_config.relay_activation", "tanh"), "relay_activation is 'tanh'"),
        (_set("dflow_config.relay_decay", 0.5), "unknown fields .'relay_decay'."),
        (_drop("block_size"), "block_size is None"),
        (_set("block_size", 1), "block_size is 1, expected an integer of at least 2"),
        (_drop("dflash_config.target_layer_ids"), "target_layer_ids is missing"),
        (_set("dflash_config.sample_from_anchor", True), "sample_from_anchor is true"),
        (_set("sample_from_anchor", True), "sample_from_anchor is true"),
        (_set("has_embed_tokens", True), "has_embed_tokens is true"),
        (_set("dflow_config.relay_norm_eps", "small"), "relay_norm_eps is 'small', expected a positive number"),
        (_set("dflash_config", "none"), "target_layer_ids is missing"),
    ],
)
def test_one_fault_is_named(edit: Callable[[dict[str, Any]], None], words: str) -> None:
    """Each fault alone gives exactly one problem, with what was expected or what to do."""
    config = copy.deepcopy(GOOD)
    edit(config)
    with pytest.raises(ValueError, match=words) as refusal:
        DFlowConfig.from_checkpoint(config, where="drafter X")
    assert "drafter X: 1 problem(s)" in str(refusal.value)


def test_all_faults_come_at_once() -> None:
    config = copy.deepcopy(GOOD)
    for edit in (_drop("dflow_config.relay_source"), _set("block_size", 0), _drop("dflash_config.target_layer_ids")):
        edit(config)
    assert len(checkpoint_problems(config)) == 3


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"hidden_size": 960}, "hidden_size is 576, but the target's is 960"),
        ({"vocab_size": 151936}, "vocab_size is 49152, but the target's is 151936"),
        ({"num_hidden_layers": 24}, r"target_layer_ids has \[28\], but the target has layers 0..23"),
        ({"num_hidden_layers": 32}, "num_target_layers is 30, but the target has 32"),
    ],
)
def test_wrong_target_is_named(sizes: dict[str, int], words: str) -> None:
    problems = target_problems(GOOD, **(TARGET | sizes))
    assert any(__import__("re").search(words, problem) for problem in problems), problems


def test_relay_tensors_are_checked_by_name_and_shape() -> None:
    expected = DFlowConfig.from_checkpoint(GOOD).tensor_shapes()
    assert expected["relay_mlp.0.weight"] == (64, 3 * 576)
    found = {f"model.{name}": shape for name, shape in expected.items()}
    assert tensor_problems(expected, found) == []
    found["model.relay_mlp.2.weight"] = (576, 64)
    del found["model.relay_norm.bias"]
    missing, misshaped = tensor_problems(expected, found)
    assert "relay_norm.bias is missing, expected shape (576,)" in missing
    assert "relay_mlp.2.weight has shape (576, 64), expected (1152, 64)" in misshaped
