"""Training data: prompts -> the target's own answers, in batched plain torch.

Owns the greedy (or sampled) batch generator, the self-written prompts, the removal of loops and the answer files.
An answers file is JSON lines ``{"id", "domain", "prompt_ids", "answer_ids", "finish"}``; it is only ever appended
to, a line at a time, so an interrupted run resumes by skipping the ids that are already there.

A target that falls into a loop makes its own text trivially predictable and inflates acceptance: an answer is cut
after the first period of a loop (``finish: "loop"``).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from sglang_dflow.training.target import Target, TargetShape

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TESTED = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"

# Beginnings of user turns that the target completes itself, by domain. An empty one leaves everything to it.
SEEDS: dict[str, list[str]] = {
    "chat": ["", "", "", "", "Write a", "Can you", "Explain", "How do", "What", "Give me", "Describe", "Imagine you are",
             "Compose", "Suggest", "Rewrite", "List", "Why", "Compare", "Summarize", "Edit the following"],
    "code": ["Write a function to", "Write a python function to", "Write a Python function that", "Write a function that",
             "Write a program to", "Implement"],
    "tested": [TESTED + "def ", TESTED + "from typing import List\n\n\ndef ", TESTED + "\ndef "],
    "math": ["Find", "What is", "If $", "Let $", "How many", "Compute", "Solve", "A ", "The ", "Simplify", "Evaluate"],
}  # fmt: skip


class Prompt(NamedTuple):
    """One conversation to answer."""

    id: str
    domain: str
    ids: list[int]  # chat template applied, generation prompt included


class Answer(NamedTuple):
    """The target's own continuation of a prompt."""

    id: str
    domain: str
    prompt_ids: list[int]
    answer_ids: list[int]
    finish: str  # "eos", "length" or "loop"


class Sampling(NamedTuple):
    """How to pick the next token; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 200  # bounds the sort that top-p needs


# --- loops -----------------------------------------------------------------------------------------------


def loop_start(tokens: Sequence[int], max_period: int = 64, min_repeats: int = 3, min_length: int = 24) -> int | None:
    """Index behind the first period of a loop that reaches the end of ``tokens``, or None.

    A loop is a tail with period ``p``, ``min_repeats`` periods and ``min_length`` tokens long.
    """
    n = len(tokens)
    for period in range(1, min(max_period, n // min_repeats) + 1):
        start = n - period
        while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
            start -= 1
        if n - start >= max(min_repeats * period, min_length):
            return start + period
    return None


# --- batched generation ----------------------------------------------------------------------------------


class _Cache:
    """Key/value cache of a left-padded batch; keys are stored transposed.

    [B * Hkv, D, T] is the layout in which a one-row bf16 product reads keys without a transpose: 3x faster here
    than scaled_dot_product_attention with its per-call packing.
    """

    def __init__(self, shape: TargetShape, batch: int, length: int, dtype: torch.dtype) -> None:
        self.shape, self.length = shape, 0
        rows = batch * shape.num_kv_heads
        self.keys = [torch.empty(rows, shape.head_dim, length, dtype=dtype) for _ in range(shape.num_layers)]
        self.values = [torch.empty(rows, length, shape.head_dim, dtype=dtype) for _ in range(shape.num_layers)]

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only the given batch rows [B']."""
        heads = self.shape.num_kv_heads
        flat = (rows[:, None] * heads + torch.arange(heads)).flatten()
        self.keys = [k[flat] for k in self.keys]
        self.values = [v[flat] for v in self.values]


def _prefill_attend(shape: TargetShape, cache: _Cache, left_pad: torch.Tensor) -> Any:
    from sglang_dflow.training.target import causal_attend

    inner = causal_attend(shape, left_pad)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        length = k.shape[1]
        cache.keys[layer][:, :, :length] = k.permute(0, 2, 3, 1).flatten(0, 1)
        cache.values[layer][:, :length] = v.transpose(1, 2).flatten(0, 1)
        return inner(layer, q, k, v)

    return attend


def _decode_attend(shape: TargetShape, cache: _Cache, bias: torch.Tensor) -> Any:
    """Attention of one new row per sequence; ``bias`` [B, 1, 1, T] hides left padding."""
    groups, end = shape.num_heads // shape.num_kv_heads, cache.length + 1
    scale = shape.head_dim**-0.5

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = cache.keys[layer], cache.values[layer]
        keys[:, :, end - 1] = k.reshape(-1, shape.head_dim)
        values[:, end - 1] = v.reshape(-1, shape.head_dim)
        query = q.reshape(-1, groups, shape.head_dim) * scale  # [B Hkv, groups, D]
        scores = torch.bmm(query, keys[:, :, :end]).view(-1, shape.num_kv_heads, groups, end)
        weights = torch.softmax(scores + bias[..., :end], dim=-1).view(-1, groups, end)
        return torch.bmm(weights, values[:, :end]).view(q.shape[0], 1, -1)  # [B, 1, Hq D]

    return attend


def _pick(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> torch.Tensor:
    """Next tokens [B] from logits [B, V]."""
    if sampling.temperature == 0.0:
        return logits.argmax(-1)
    values, ids = torch.topk(logits.float() / sampling.temperature, sampling.top_k, dim=-1)
    probs = F.softmax(values, dim=-1)
    outside = probs.cumsum(-1) - probs > sampling.top_p
    choice = torch.multinomial(probs.masked_fill(outside, 0.0), 1, generator=generator)  # [B, 1]
    return ids.gather(-1, choice)[:, 0]


@torch.inference_mode()
def generate_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
    generator: torch.Generator | None = None,
    cut_loops: bool = True,
) -> list[tuple[list[int], str]]:
    """Continue each prompt to its end token; returns (tokens, finish) per prompt, in order."""
    generator = generator or torch.Generator().manual_seed(0)
    shape, batch, width = target.shape, len(prompts), max(len(p) for p in prompts)
    pad = torch.tensor([width - len(p) for p in prompts])  # [B]
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])  # [B, width]
    cache = _Cache(shape, batch, width + max_new_tokens, target.dtype)
    positions = (torch.arange(width)[None] - pad[:, None]).clamp_min(0)
    hidden = target.forward(ids, positions, _prefill_attend(shape, cache, pad)).hidden
    cache.length = width
    columns = torch.arange(width + max_new_tokens)
    bias = torch.where(columns[None] < pad[:, None], float("-inf"), 0.0).to(target.dtype)[:, None, None]
    produced: list[list[int]] = [[] for _ in range(batch)]
    finish = ["length"] * batch
    rows = torch.arange(batch)  # original index of each batch row still alive
    last = _pick(target.logits(hidden[:, -1]), sampling, generator)  # [B']
    eos = set(target.eos_token_ids)
    for step in range(max_new_tokens):
        alive = []
        for row, (index, token) in enumerate(zip(rows.tolist(), last.tolist())):
            produced[index].append(token)
            if token in eos:
                finish[index] = "eos"
            elif cut_loops and step % 16 == 15 and (start := loop_start(produced[index])) is not None:
                del produced[index][start:]
                finish[index] = "loop"
            else:
                alive.append(row)
        if not alive or step == max_new_tokens - 1:
            break
        # Copying the cache costs about one step, so it waits until a quarter of the rows are done.
        if len(alive) <= 0.75 * len(rows):
            keep = torch.tensor(alive)
            cache.keep(keep)
            rows, last, pad, bias = rows[keep], last[keep], pad[keep], bias[keep]
        hidden = target.forward(
            last[:, None], (cache.length - pad)[:, None], _decode_attend(shape, cache, bias)
        ).hidden  # [B', 1, H]
        cache.length += 1
        last = _pick(target.logits(hidden[:, 0]), sampling, generator)
        _drop_dead(produced, finish, rows)
    if cut_loops:
        for index, tokens in enumerate(produced):
            if finish[index] == "length" and (start := loop_start(tokens)) is not None:
                del tokens[start:]
                finish[index] = "loop"
    return [(tokens, reason) for tokens, reason in zip(produced, finish)]
