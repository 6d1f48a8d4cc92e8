"""The target runner against transformers' own forward, one tiny random model per architecture (float32)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from sglang_dflow.training.target import Target, causal_attend

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 60, "max_position_embeddings": 256, "eos_token_id": 7,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}

CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama head_dim": LlamaConfig(**SIZES, head_dim=16),
    "llama3 rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2 biases": Qwen2Config(**SIZES),
    "qwen3 norms": Qwen3Config(**SIZES, head_dim=16),
    "qwen3 tied yarn": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True, rope_parameters=YARN),
}


def tiny(config: Any) -> Any:
    """A model whose norms, biases and every other parameter are random, so that a forgotten one shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_captured_states_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Catches a forgotten bias, norm, head or rotary scaling, a wrong head_dim, and an off-by-one in the captured
    layers: layer i is ``hidden_states[i + 1]`` of transformers, in the order of ``target_layer_ids``."""
    model = tiny(CONFIGS[name])
    model.save_pretrained(tmp_path)
    target = Target.load(tmp_path, torch.float32, [2, 0])
    ids = torch.randint(0, 60, (2, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=ids, output_hidden_states=True)
        got = target.forward(ids, torch.arange(150).expand(2, -1), causal_attend(target.shape), capture=True)
    assert (target.logits(got.hidden) - expected.logits).abs().max() < 1e-4
    states = torch.cat([expected.hidden_states[3], expected.hidden_states[1]], dim=-1)
    assert got.captured is not None and (got.captured - states).abs().max() < 1e-4
    assert target.eos_token_ids == [7]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(n_embd=32, n_layer=1, n_head=2), "supports llama, mistral, qwen2, qwen3"),
        (Gemma2Config(**SIZES), "supports llama, mistral, qwen2, qwen3"),
        (MistralConfig(**SIZES, sliding_window=16), "sliding_window 16"),
        (
            Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=2),
            "sliding_window 16",
        ),
        (LlamaConfig(**SIZES, mlp_bias=True), "mlp_bias"),
        (LlamaConfig(**SIZES, attention_bias=True), "attention_bias"),
        (LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "'dynamic'"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "'gelu'"),
    ],
)
def test_what_it_would_compute_wrongly_is_refused(config: Any, message: str, tmp_path: Path) -> None:
    """Catches a target that is loaded and then silently gives other logits than the server."""
    config.save_pretrained(tmp_path)  # no weights: the refusal comes before they are read
    with pytest.raises(ValueError, match=message):
        Target.load(tmp_path, torch.float32)


def test_last_layer_cannot_be_captured() -> None:
    """Catches a layer id that the host would not capture: it reads the input of layer i + 1."""
    with pytest.raises(ValueError, match=r"target_layer_ids \[3\]"):
        Target.from_transformers(tiny(CONFIGS["llama"]), [0, 3])


def test_nothing_is_created_off_the_device_of_the_weights() -> None:
    """Catches a helper tensor made on the default device: wrong as soon as the weights are on a GPU.

    The meta device stands in for CUDA: an operation that mixes it with a CPU tensor raises.
    """
    target = Target.from_transformers(tiny(CONFIGS["qwen3 norms"]).to("meta"), [1])
    ids = torch.zeros(2, 9, dtype=torch.int64, device="meta")
    positions = torch.arange(9, device="meta").expand(2, -1)
    for left_pad in (None, torch.tensor([0, 2], device="meta")):
        out = target.forward(ids, positions, causal_attend(target.shape, left_pad), capture=True)
        assert out.captured is not None and out.captured.device.type == "meta"
        assert target.logits(out.hidden).shape == (2, 9, 60)
