"""A random target and DFlow drafter that divide by two ranks (SmolLM2's three KV heads do not)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import torch

from sglang_dflow.training.drafter import Drafter, DrafterConfig
from sglang_dflow.training.target import Target

VOCAB_SIZE, EOS = 96, 95


class TinyPair(NamedTuple):
    target: Path
    drafter: Path


@torch.no_grad()
def make_tiny_pair(folder: Path) -> TinyPair:
    """Write both; the relay is loud and reads the stale token, so that its embeddings decide what is drafted; a
    rescorer at random takes other tokens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    pair = TinyPair(folder / "target", folder / "drafter")
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCAB_SIZE, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=EOS,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    model.save_pretrained(pair.target)

    target = Target.load(pair.target, torch.float32, [0, 1])
    drafter_config = DrafterConfig.for_target(target, num_hidden_layers=2, block_size=4, mask_token_id=1)
    relay = {"relay_source": "first_rejection", "relay_hidden_size": 24, "relay_stale_token": True}
    relay |= {"relay_rescore_size": 16, "relay_rescore_top_k": 3, "relay_rescore_code_size": 8}
    drafter = Drafter(dataclasses.replace(drafter_config, **relay))
    drafter.init_from_target(target, [1, 2])
    assert drafter.relay is not None
    for parameter in drafter.relay.relay_mlp[2].parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    assert drafter.rescorer is not None
    for parameter in drafter.rescorer.parameters():
        torch.nn.init.normal_(parameter)
    drafter.save(pair.drafter, torch.float32)
    return pair
