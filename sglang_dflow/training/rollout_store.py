"""Rollouts on disk: written once per refresh, read by slices from memory-mapped files.

A block's rollout is B * m * H bf16 values (46 kB for SmolLM2 at block 8), so a refresh is gigabytes. Owns the layout of
``run_dir/rollouts/STEP/RANK-SHARD.safetensors``: per round ``r.FIELD`` with the blocks of all sequences side by side,
``sequences`` [n] and ``counts`` [rounds, n]; its metadata say what it was made with. Every process reads the shards of
all processes.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sglang_dflow.training.rollout import Relayed

SHARD_SEQUENCES = 100


class _Place(NamedTuple):
    """Where the blocks of one sequence and round are."""

    shard: int
    start: int
    end: int


def finished_sequences(folder: Path, rank: int, world: int, made_with: dict[str, str]) -> list[int]:
    """Sequences that an interrupted refresh left to this process, in their order.

    Shards that were made with something else are removed: each of ``world`` processes sees to
    its own and to those of processes that there are no more.
    """
    from safetensors import safe_open

    found: list[int] = []
    for path in sorted(folder.glob("*.safetensors")):
        if int(path.name.partition("-")[0]) % world != rank:
            continue
        with safe_open(path, framework="pt") as handle:
            if handle.metadata() == made_with:
                found += handle.get_tensor("sequences").tolist()
                continue
        path.unlink()
    return found


def write_rollouts(
    folder: Path, rank: int, rollouts: Iterator[tuple[int, list[Relayed]]], rounds: int, made_with: dict[str, str]
) -> None:
    """Write (sequence index, its rounds) as shards of ``SHARD_SEQUENCES`` sequences, behind those that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    shard = len(list(folder.glob(f"{rank}-*.safetensors")))
    while items := list(itertools.islice(rollouts, SHARD_SEQUENCES)):
        _write_shard(folder / f"{rank}-{shard:05d}.safetensors", items, rounds, made_with)
        shard += 1


def _write_shard(
    path: Path, items: Sequence[tuple[int, list[Relayed]]], rounds: int, made_with: dict[str, str]
) -> None:
    from safetensors.torch import save_file

    counts = [[len(chain[r].anchors) if r < len(chain) else 0 for _, chain in items] for r in range(rounds)]
    tensors = {"sequences": torch.tensor([index for index, _ in items]), "counts": torch.tensor(counts)}
    for number in range(rounds):
        present = [chain[number] for _, chain in items if number < len(chain)]
        for name, parts in zip(Relayed._fields, zip(*present)):
            tensors[f"{number}.{name}"] = torch.cat(parts).cpu().contiguous()
    partial = path.with_suffix(".part")
    save_file(tensors, partial, metadata=made_with)
    partial.replace(path)


class RolloutStore:
    """Read access to one refresh."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self.folder = folder
        self._shards: list[Any] = []
        self._places: dict[tuple[int, int], _Place] = {}  # (sequence, round)
        for path in sorted(folder.glob("*.safetensors")):
            handle = safe_open(path, framework="pt")
            counts = handle.get_tensor("counts")
            ends = counts.cumsum(1)
            for column, sequence in enumerate(handle.get_tensor("sequences").tolist()):
                for number in range(len(counts)):
                    end, count = int(ends[number, column]), int(counts[number, column])
                    if count:
                        self._places[sequence, number] = _Place(len(self._shards), end - count, end)
            self._shards.append(handle)

    @property
    def sequences(self) -> list[int]:
        """Sequences with at least one relayed block, ascending."""
        return sorted({sequence for sequence, number in self._places if number == 0})

    def get(self, sequence: int, number: int) -> Relayed | None:
        """Blocks that round ``number + 1`` of a sequence drafts from, or None."""
        place = self._places.get((sequence, number))
        if place is None:
            return None
        handle = self._shards[place.shard]
        return Relayed(*(handle.get_slice(f"{number}.{name}")[place.start : place.end] for name in Relayed._fields))


def drop_older(parent: Path, keep: Path) -> None:
    """Remove the refreshes before ``keep``."""
    for folder in parent.iterdir():
        if folder.is_dir() and folder != keep:
            shutil.rmtree(folder)
