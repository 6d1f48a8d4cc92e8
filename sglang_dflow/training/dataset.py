"""Answers and their captured states as training batches.

Owns length-bucketed batching and anchor sampling. Captured states are views of the mapped shards (states.py) where
they were stored; where not, ``collate`` computes them with the target. Every random choice of step ``n`` comes from
a generator seeded with (seed, n): resuming needs only the step number.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from sglang_dflow.training.data import read_answers, state_rows
from sglang_dflow.training.prompts import conversation_of
from sglang_dflow.training.states import StateStore, capture_each, states_dir
from sglang_dflow.training.target import Target


class Sample(NamedTuple):
    """One conversation: tokens, where its answer begins, and its captured states."""

    id: str
    domain: str
    tokens: torch.Tensor  # [N] int64
    prompt_len: int
    states: torch.Tensor | None  # [N - 1, m * H] bf16, a view of the mapped shard; None: not stored


class Batch(NamedTuple):
    """Sequences of similar length, padded."""

    tokens: torch.Tensor  # [S, T + 1 + B] int64, zero-padded
    lengths: torch.Tensor  # [S] number of tokens
    prompt_lens: torch.Tensor  # [S]
    captured: torch.Tensor  # [S, T, m * H]
    indices: list[int]  # where each sequence stands in the data set


def load_sequences(
    paths: Sequence[str | Path],
    features: int,
    min_answer: int = 4,
    target_layer_ids: Sequence[int] | None = None,
) -> list[Sample]:
    """Map answer files into sequences, with their states (``features`` = m * H wide) where these were stored.

    Answers shorter than ``min_answer`` tokens are left out.

    Raises:
        ValueError: stored states of another width, of other layers than ``target_layer_ids`` (if given), or of
            another answer.
    """
    sequences: list[Sample] = []
    for path in paths:
        store = StateStore(states_dir(path), features, target_layer_ids)
        for answer in read_answers([path]):
            if len(answer.answer_ids) >= min_answer:
                tokens = torch.tensor(answer.prompt_ids + answer.answer_ids)
                states = store.get(answer.id, state_rows(answer))
                sequences.append(Sample(answer.id, answer.domain, tokens, len(answer.prompt_ids), states))
    return sequences


def split_held_out(sequences: list[Sample], one_in: int) -> tuple[list[Sample], list[Sample]]:
    """(training, held-out): by a hash of the conversation's id, so that a choice survives data that is added later,
    and all turns and samples of one conversation are on the same side."""
    kept: tuple[list[Sample], list[Sample]] = ([], [])
    for sample in sequences:
        kept[zlib.crc32(conversation_of(sample.id).encode()) % one_in == 0].append(sample)
    return kept


def epoch_batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int, window: int = 16) -> list[list[int]]:
    """One epoch's batches of sequence indices: shuffled, similar lengths together to save padding."""
    rng = random.Random(f"{seed}/{epoch}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    batches = []
    for start in range(0, len(order), window * batch_size):
        chunk = sorted(order[start : start + window * batch_size], key=lambda i: lengths[i])
        batches += [chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size)]
    batches = [batch for batch in batches if len(batch) == batch_size] or batches
    rng.shuffle(batches)
    return batches


def collate(sequences: Sequence[Sample], indices: list[int], block_size: int, target: Target | None = None) -> Batch:
    """Pad the chosen sequences into one batch.

    Raises:
        ValueError: a sequence has no stored states and no ``target`` was given to compute them.
    """
    chosen = [sequences[i] for i in indices]
    states = _states_of(chosen, target)
    longest = max(len(s.tokens) for s in chosen)
    tokens = torch.zeros(len(chosen), longest + block_size, dtype=torch.int64)
    captured = torch.zeros(len(chosen), longest - 1, states[0].shape[-1], dtype=torch.bfloat16)
    for row, (sequence, rows) in enumerate(zip(chosen, states)):
        tokens[row, : len(sequence.tokens)] = sequence.tokens
        captured[row, : len(rows)] = rows
    lengths = torch.tensor([len(s.tokens) for s in chosen])
    return Batch(tokens, lengths, torch.tensor([s.prompt_len for s in chosen]), captured, indices)


def _states_of(samples: Sequence[Sample], target: Target | None) -> list[torch.Tensor]:
    """States [N - 1, m * H] of each sample: stored, or computed."""
    missing = [row for row, sample in enumerate(samples) if sample.states is None]
    if missing and target is None:
        raise ValueError(
            f"{samples[missing[0]].id!r} has no stored states and there is no target to compute them. Remedy: run "
            "prepare-data with --states, or pass the target to collate."
        )
    computed: dict[int, torch.Tensor] = {}
    if missing and target is not None:
        computed = dict(zip(missing, capture_each(target, [samples[row].tokens[:-1].tolist() for row in missing])))
    return [computed[row] if s.states is None else s.states for row, s in enumerate(samples)]


def sample_anchors(batch: Batch, count: int, generator: torch.Generator) -> torch.Tensor:
    """Anchors [S, count] in the answer part, each with at least one label behind it; without replacement while
    there are enough positions, repeated after that."""
    rows = []
    for start, end in zip(batch.prompt_lens.tolist(), batch.lengths.tolist()):
        positions = torch.arange(start, max(end - 1, start + 1))
        order = torch.randperm(len(positions), generator=generator, device="cpu").to(positions.device)
        rows.append(positions[order.repeat(-(-count // len(order)))[:count]].sort().values)
    return torch.stack(rows)


class BlockLabels(NamedTuple):
    """Tokens under each block's rows."""

    tokens: torch.Tensor  # [S, A, B]
    valid: torch.Tensor  # [S, A, B] False behind the end of the sequence


def labels_at(batch: Batch, anchors: torch.Tensor, block_size: int) -> BlockLabels:
    """The trajectory's tokens at the positions of each block's rows: anchors [S, A]."""
    positions = anchors[:, :, None] + torch.arange(block_size)  # [S, A, B]
    valid = positions < batch.lengths[:, None, None]
    clamped = positions.clamp_max(batch.tokens.shape[1] - 1)
    tokens = batch.tokens.gather(1, clamped.flatten(1)).view_as(positions)
    return BlockLabels(tokens, valid)
