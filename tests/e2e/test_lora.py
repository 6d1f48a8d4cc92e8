"""LoRA adapters on the target: three kinds of requests in one batch, each answered as its own merged model answers.

The reference is transformers with the adapter added to the weights: it knows nothing of batches, slots or blocks.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from sglang_dflow.server import Server, ServerSpec, post
from tests.support.arms import POOL_ARGS
from tests.support.tiny_pair import VOCAB_SIZE, make_tiny_pair

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANKS = {"small": 4, "large": 8}
SCALING = 2.0
NEW_TOKENS = 32


class Served(NamedTuple):
    """Answers in the order of `asked`, a prompt and the name of an adapter each."""

    asked: list[tuple[list[int], str | None]]
    answers: list[dict[str, Any]]
    merged: dict[str | None, Any]


@torch.no_grad()
def _make_adapter(model: Any, path: Path, rank: int) -> Any:
    """Write a random adapter in peft's layout; return a copy of the model with it merged."""
    merged, tensors = copy.deepcopy(model), {}
    for name, layer in merged.named_modules():
        if name.rsplit(".")[-1] in TARGETS:
            down = torch.randn(rank, layer.in_features) * layer.in_features**-0.5
            up = torch.randn(layer.out_features, rank) * 0.5 * rank**-0.5
            layer.weight += SCALING * up @ down
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": SCALING * rank, "target_modules": TARGETS}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return merged


@torch.no_grad()
def _greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])  # [1, n]
    for _ in range(NEW_TOKENS):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("lora")
    pair = make_tiny_pair(folder)
    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    torch.manual_seed(2)
    merged = {None: model} | {name: _make_adapter(model, folder / name, rank) for name, rank in RANKS.items()}
    prompts = [torch.randint(2, VOCAB_SIZE - 1, (9 + i,)).tolist() for i in range(3)]
    asked = [(prompt, name) for prompt in prompts for name in merged]
    paths = [f"{name}={folder / name}" for name in RANKS]
    spec = ServerSpec(
        model=str(pair.target),
        drafter=str(pair.drafter),
        dtype="float32",
        extra_args=(*POOL_ARGS, "--skip-tokenizer-init", "--max-running-requests", "12", "--lora-paths", *paths),
    )
    body = {
        "input_ids": [prompt for prompt, _ in asked],
        "lora_path": [name for _, name in asked],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
    }
    with Server(spec, log_path=folder / "server.log") as server:
        answers = post(server.url, "/generate", body)
    return Served(asked, answers, merged)


def test_every_request_is_answered_with_its_own_adapter(served: Served) -> None:
    """An adapter of a neighbour in the batch, or one that stays out of rows behind the first of a verified block."""
    for (prompt, name), answer in zip(served.asked, served.answers, strict=True):
        assert answer["output_ids"] == _greedy(served.merged[name], prompt), (name, prompt)


def test_adapters_matter_and_blocks_are_accepted(served: Served) -> None:
    """The comparison above would be empty if adapters changed nothing, or if no draft was ever accepted or relayed."""
    number = len(served.merged)
    for start in range(0, len(served.answers), number):
        same_prompt = served.answers[start : start + number]
        assert len({tuple(answer["output_ids"]) for answer in same_prompt}) == number
    infos = [answer["meta_info"] for answer in served.answers]
    assert sum(info["spec_verify_ct"] for info in infos) < 0.97 * sum(info["completion_tokens"] for info in infos)
    assert all(info["relayed_rows"] > 0 for info in infos)
