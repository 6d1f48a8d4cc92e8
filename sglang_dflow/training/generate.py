"""Batched generation of the target's own answers, in plain torch.

Owns the batch generator (greedy or sampled) and the removal of loops. A target that falls into a loop makes its own
text trivially predictable and inflates acceptance: an answer is cut after the first period of a loop
(``finish: "loop"``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from sglang_dflow.training.target import Attend, Target, TargetShape, causal_attend


class Generated(NamedTuple):
    """One continuation, with the captured states of every row that went through the target."""

    tokens: list[int]
    finish: str
    states: torch.Tensor | None  # [len(prompt) + len(tokens) - 1, m * H]; None unless asked for


class Sampling(NamedTuple):
    """How to pick the next token; temperature 0 is greedy, top_p 1 samples from the whole vocabulary."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 200  # only with top_p below 1: bounds the sort that it needs


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


LOOP_CHECK_STEPS = 16
"""Tokens between two looks for a loop while an answer grows."""


def cut_loop(tokens: Sequence[int], finish: str) -> tuple[list[int], str]:
    """A finished answer as ``generate_batch`` would have left it: for answers that a server made without the cut."""
    # An end token stands in no loop: it would have ended the answer the first time.
    ends = [*range(LOOP_CHECK_STEPS, len(tokens) + 1, LOOP_CHECK_STEPS), *([len(tokens)] if finish == "length" else [])]
    for length in ends:
        start = loop_start(tokens[:length])
        if start is not None:
            return list(tokens[:start]), "loop"
    return list(tokens), finish


# --- batched generation ----------------------------------------------------------------------------------


class _Cache:
    """Key/value cache of a left-padded batch; keys are stored transposed.

    [B * Hkv, D, T] is the layout in which a one-row bf16 product reads keys without a transpose: 3x faster here
    than scaled_dot_product_attention with its per-call packing.
    """

    def __init__(self, target: Target, batch: int, length: int) -> None:
        self.shape, self.length = target.shape, 0
        rows, size, layers = batch * self.shape.num_kv_heads, self.shape.head_dim, range(self.shape.num_layers)
        self.keys = [target.embedding.new_empty(rows, size, length) for _ in layers]
        self.values = [target.embedding.new_empty(rows, length, size) for _ in layers]

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only the given batch rows [B']."""
        heads = self.shape.num_kv_heads
        flat = (rows[:, None] * heads + torch.arange(heads, device=rows.device)).flatten()
        self.keys = [k[flat] for k in self.keys]
        self.values = [v[flat] for v in self.values]


def _prefill_attend(shape: TargetShape, cache: _Cache, left_pad: torch.Tensor) -> Attend:
    inner = causal_attend(shape, left_pad)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        length = k.shape[1]
        cache.keys[layer][:, :, :length] = k.permute(0, 2, 3, 1).flatten(0, 1)
        cache.values[layer][:, :length] = v.transpose(1, 2).flatten(0, 1)
        return inner(layer, q, k, v)

    return attend


def _decode_attend(shape: TargetShape, cache: _Cache, bias: torch.Tensor) -> Attend:
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
    scaled = logits.float() / sampling.temperature
    if sampling.top_p >= 1.0:
        return torch.multinomial(F.softmax(scaled, dim=-1), 1, generator=generator)[:, 0]
    values, ids = torch.topk(scaled, min(sampling.top_k, scaled.shape[-1]), dim=-1)
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
    capture: bool = False,
) -> list[Generated]:
    """Continue each prompt to its end token, in order.

    ``capture`` keeps the captured states on the way: generation computes them anyway, so training data comes with
    its features and needs no second pass over the text.
    """
    device = target.device
    generator = generator or torch.Generator(device).manual_seed(0)
    shape, batch, width = target.shape, len(prompts), max(len(p) for p in prompts)
    pad = torch.tensor([width - len(p) for p in prompts], device=device)  # [B]
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)  # [B, width]
    cache = _Cache(target, batch, width + max_new_tokens)
    positions = (torch.arange(width, device=device)[None] - pad[:, None]).clamp_min(0)
    hidden, captured = target.forward(ids, positions, _prefill_attend(shape, cache, pad), capture)
    cache.length = width
    states = None
    if captured is not None:
        states = captured.new_empty(batch, width + max_new_tokens, captured.shape[-1])  # [B, T, m * H]
        states[:, :width] = captured
    columns = torch.arange(width + max_new_tokens, device=device)
    bias = torch.where(columns[None] < pad[:, None], float("-inf"), 0.0).to(target.dtype)[:, None, None]
    produced: list[list[int]] = [[] for _ in range(batch)]
    finish = [""] * batch  # empty while the answer grows
    rows = torch.arange(batch, device=device)  # original index of each batch row still alive
    last = _pick(target.logits(hidden[:, -1]), sampling, generator)  # [B']
    eos = set(target.eos_token_ids)
    for step in range(max_new_tokens):
        alive = []
        for row, (index, token) in enumerate(zip(rows.tolist(), last.tolist())):
            if finish[index]:
                continue  # done, not yet compacted away
            produced[index].append(token)
            if token in eos:
                finish[index] = "eos"
            elif (
                cut_loops and (step + 1) % LOOP_CHECK_STEPS == 0 and (start := loop_start(produced[index])) is not None
            ):
                del produced[index][start:]
                finish[index] = "loop"
            else:
                alive.append(row)
        if not alive or step == max_new_tokens - 1:
            break
        # Copying the cache costs about one step, so it waits until a quarter of the rows are done.
        if len(alive) <= 0.75 * len(rows):
            keep = torch.tensor(alive, device=device)
            cache.keep(keep)
            rows, last, pad, bias = rows[keep], last[keep], pad[keep], bias[keep]
        attend = _decode_attend(shape, cache, bias)
        hidden, captured = target.forward(last[:, None], (cache.length - pad)[:, None], attend, capture)  # [B', 1, ..]
        if states is not None and captured is not None:
            states[rows, cache.length] = captured[:, 0]
        cache.length += 1
        last = _pick(target.logits(hidden[:, 0]), sampling, generator)
    for index, tokens in enumerate(produced):
        if not finish[index]:
            finish[index] = "length"
            if cut_loops and (start := loop_start(tokens)) is not None:
                del tokens[start:]
                finish[index] = "loop"
    return [
        Generated(
            tokens,
            finish[index],
            None if states is None else states[index, width - len(prompts[index]) : width + len(tokens) - 1],
        )
        for index, tokens in enumerate(produced)
    ]


class Generate(Protocol):
    """Something that continues prompts with the target: in this process, or a server."""

    def __call__(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling, seed: int, capture: bool
    ) -> list[Generated]:
        """Continue each prompt, in order, loops cut; ``capture`` asks for states, which a server does not give."""
        ...


class LocalGenerate:
    """``Generate`` in this process."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def __call__(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling, seed: int, capture: bool
    ) -> list[Generated]:
        """Continue each prompt; the same seed and prompts give the same answers."""
        generator = torch.Generator(self.target.device).manual_seed(seed)
        return generate_batch(self.target, prompts, max_new_tokens, sampling, generator, capture=capture)
