"""Answers and their captured states as training batches.

Owns the memory-mapped view of the states files, length-bucketed batching and anchor sampling. Every random choice
of step ``n`` comes from a generator seeded with (seed, n): resuming needs only the step number.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from sglang_dflow.training.data import Answer, read_answers, state_rows, states_file


class Sample(NamedTuple):
    """One conversation: tokens, where its answer begins, and its captured states."""

    id: str
    domain: str
    tokens: torch.Tensor  # [N] int64
    prompt_len: int
    states: torch.Tensor  # [N - 1, m * H] bf16, a view of the memory-mapped file


class Batch(NamedTuple):
    """Sequences of similar length, padded."""

    tokens: torch.Tensor  # [S, T + 1 + B] int64, zero-padded
    lengths: torch.Tensor  # [S] number of tokens
    prompt_lens: torch.Tensor  # [S]
    captured: torch.Tensor  # [S, T, m * H]
    indices: list[int]  # where each sequence stands in the data set


def load_sequences(paths: Sequence[str | Path], features: int, min_answer: int = 4) -> list[Sample]:
    """Map answer files (and their states, ``features`` = m * H wide) into sequences."""
    sequences: list[Sample] = []
    for path in paths:
        answers = read_answers([path])
        rows = sum(map(state_rows, answers))
        actual = states_file(path).stat().st_size
        if actual < rows * features * 2:
            raise ValueError(
                f"{states_file(path)} holds {actual} bytes, expected at least {rows * features * 2} for {rows} rows of "
                f"{features} bf16 values; were the answers made with other target_layer_ids? Run prepare-data again."
            )
        mapped = torch.from_file(str(states_file(path)), shared=False, size=rows * features, dtype=torch.bfloat16)
        sequences += _split(answers, mapped.view(rows, features), min_answer)
    return sequences


def _split(answers: Sequence[Answer], states: torch.Tensor, min_answer: int) -> list[Sample]:
    out, start = [], 0
    for answer in answers:
        rows = state_rows(answer)
        if len(answer.answer_ids) >= min_answer:
            tokens = torch.tensor(answer.prompt_ids + answer.answer_ids)
            view = states[start : start + rows]
            out.append(Sample(answer.id, answer.domain, tokens, len(answer.prompt_ids), view))
        start += rows
    return out


def split_held_out(sequences: list[Sample], one_in: int) -> tuple[list[Sample], list[Sample]]:
    """(training, held-out): by a hash of the id, so that a choice survives data that is added later."""
    held = [s for s in sequences if zlib.crc32(s.id.encode()) % one_in == 0]
    return [s for s in sequences if zlib.crc32(s.id.encode()) % one_in != 0], held


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


def collate(sequences: Sequence[Sample], indices: list[int], block_size: int) -> Batch:
    """Pad the chosen sequences into one batch."""
    chosen = [sequences[i] for i in indices]
    longest = max(len(s.tokens) for s in chosen)
    tokens = torch.zeros(len(chosen), longest + block_size, dtype=torch.int64)
    captured = torch.zeros(len(chosen), longest - 1, chosen[0].states.shape[-1], dtype=torch.bfloat16)
    for row, sequence in enumerate(chosen):
        tokens[row, : len(sequence.tokens)] = sequence.tokens
        captured[row, : len(sequence.states)] = sequence.states
    lengths = torch.tensor([len(s.tokens) for s in chosen])
    return Batch(tokens, lengths, torch.tensor([s.prompt_len for s in chosen]), captured, indices)


def sample_anchors(batch: Batch, count: int, generator: torch.Generator) -> torch.Tensor:
    """Anchors [S, count] in the answer part, each with at least one label behind it; without replacement while
    there are enough positions, repeated after that."""
    rows = []
    for start, end in zip(batch.prompt_lens.tolist(), batch.lengths.tolist()):
        positions = torch.arange(start, max(end - 1, start + 1))
        order = torch.randperm(len(positions), generator=generator)
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
