"""A training run of seconds: a tiny target's checkpoint, its conversations, a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import yaml


def make_workplace(folder: Path) -> Path:
    """A tiny random Qwen3 target and twelve conversations without stored states, in ``folder``."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

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


def write_recipe(folder: Path, name: str, **fields: object) -> Path:
    """A recipe of four steps for that target, with run directory ``folder / name``."""
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
