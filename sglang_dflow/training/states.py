"""Captured states on disk: one memory-mapped safetensors shard per answered batch, or none at all.

Layout beside ``answers.jsonl``: ``answers.states/00000.safetensors``, ``00001...``, each with one tensor ``states``
[rows, m * H] bf16, conversations one behind the other, and metadata ``ids`` and ``rows`` (JSON lists, one entry a
conversation), ``first_row`` (rows of all earlier shards), ``target_layer_ids`` (JSON list) and ``target`` (name).
A conversation of N tokens has N - 1 rows: nothing reads the state of its last token.

A shard is written under another name and renamed, before the answers' own lines: a shard without lines is an
interrupted batch and does no harm, since conversations are looked up by id and the newest shard wins. Shards are
mapped, not read: a conversation's states are a view of the file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from sglang_dflow.training.target import Target, causal_attend


def states_dir(answers_path: str | Path) -> Path:
    """Where the captured states of an answers file are."""
    return Path(answers_path).with_suffix(".states")


@torch.no_grad()
def capture_states(target: Target, tokens: torch.Tensor) -> torch.Tensor:
    """Captured states [S, T, m * H] of ``tokens`` [S, T], padded on the right: one causal pass of the target.

    Rows behind a sequence's end are meaningless. What training uses when no states were stored.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)
    captured = target.forward(tokens, positions, causal_attend(target.shape), capture=True).captured
    if captured is None:
        raise ValueError("the target captures no layers; expected target_layer_ids. Remedy: load it with some.")
    return captured


def capture_each(target: Target, sequences: Sequence[Sequence[int]], batch_rows: int = 8192) -> list[torch.Tensor]:
    """Captured states [len, m * H] of each sequence, in order; at most ``batch_rows`` padded rows a pass."""
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]), reverse=True)
    states: dict[int, torch.Tensor] = {}
    while order:
        longest = len(sequences[order[0]])
        count = max(1, batch_rows // longest)
        chosen, order = order[:count], order[count:]
        tokens = torch.zeros(len(chosen), longest, dtype=torch.int64)
        for row, index in enumerate(chosen):
            tokens[row, : len(sequences[index])] = torch.tensor(sequences[index])
        captured = capture_states(target, tokens.to(target.device))
        for row, index in enumerate(chosen):
            states[index] = captured[row, : len(sequences[index])]
    return [states[index] for index in range(len(sequences))]


def check_room(directory: Path, size: int) -> None:
    """Refuse to start writing ``size`` bytes where they do not fit.

    Raises:
        RuntimeError: the file system of ``directory`` has less room.
    """
    free = shutil.disk_usage(next(p for p in (directory, *directory.resolve().parents) if p.exists())).free
    if size > free:
        raise RuntimeError(
            f"captured states need up to {size / 1e9:.2f} GB in {directory}, which has {free / 1e9:.2f} GB free. "
            "Remedy: another --out, fewer prompts, a smaller --max-new-tokens, or --no-states: training computes them."
        )


class StateWriter:
    """Appends shards to a directory; numbering goes on behind those that are there."""

    def __init__(self, directory: Path, target_layer_ids: Sequence[int], target_name: str) -> None:
        self.directory = directory
        self.metadata = {"target_layer_ids": json.dumps(list(target_layer_ids)), "target": target_name}
        directory.mkdir(parents=True, exist_ok=True)
        shards = [_Shard(path) for path in _shard_paths(directory)]
        for shard in shards:
            shard.check_layers(target_layer_ids)
        self.number = int(shards[-1].path.stem) + 1 if shards else 0
        self.first_row = sum(sum(shard.rows) for shard in shards)

    def write(self, ids: Sequence[str], states: Sequence[torch.Tensor]) -> Path:
        """Write one shard: ``states[i]`` [rows, m * H] belongs to conversation ``ids[i]``."""
        from safetensors.torch import save_file

        rows = [len(item) for item in states]
        own = {"ids": json.dumps(list(ids)), "rows": json.dumps(rows), "first_row": str(self.first_row)}
        path = self.directory / f"{self.number:05d}.safetensors"
        part = path.with_suffix(".part")
        save_file({"states": torch.cat([item.to("cpu", torch.bfloat16) for item in states])}, part, self.metadata | own)
        part.replace(path)
        self.number += 1
        self.first_row += sum(rows)
        return path


class StateStore:
    """The mapped shards of one answers file."""

    def __init__(self, directory: Path, features: int, target_layer_ids: Sequence[int] | None = None) -> None:
        """Map every shard of ``directory``; nothing is read but headers.

        Raises:
            ValueError: states of another width than ``features`` = m * H, or of other layers.
        """
        self._views: dict[str, torch.Tensor] = {}
        for path in _shard_paths(directory):
            shard = _Shard(path)
            if target_layer_ids is not None:
                shard.check_layers(target_layer_ids)
            mapped = shard.mapped()  # [rows, m * H]
            if mapped.shape[1] != features:
                raise ValueError(
                    f"{path} holds states of {mapped.shape[1]} values, expected {features} (m * H); it was made with "
                    f"target_layer_ids {shard.target_layer_ids}. Remedy: use these, or run prepare-data again."
                )
            for name, view in zip(shard.ids, mapped.split(shard.rows)):
                self._views[name] = view

    def get(self, name: str, rows: int) -> torch.Tensor | None:
        """States [rows, m * H] of a conversation, a view of the file; None where none are stored.

        Raises:
            ValueError: stored with another number of rows, so not the states of this answer.
        """
        view = self._views.get(name)
        if view is not None and len(view) != rows:
            raise ValueError(
                f"the stored states of {name!r} have {len(view)} rows, its answer has {rows}: they do not belong "
                "together. Remedy: delete the states directory (training computes them) or run prepare-data again."
            )
        return view


class _Shard:
    """One file: header read, tensor mapped on demand."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self.path = path
        self._file = safe_open(str(path), framework="pt")
        metadata = self._file.metadata()
        self.ids: list[str] = json.loads(metadata["ids"])
        self.rows: list[int] = json.loads(metadata["rows"])
        self.target_layer_ids: list[int] = json.loads(metadata["target_layer_ids"])

    def mapped(self) -> torch.Tensor:
        """The states [rows, m * H]; safetensors maps the file, pages come when they are touched."""
        states: torch.Tensor = self._file.get_tensor("states")
        return states

    def check_layers(self, target_layer_ids: Sequence[int]) -> None:
        if self.target_layer_ids != list(target_layer_ids):
            raise ValueError(
                f"{self.path} holds states of the layers {self.target_layer_ids}, expected {list(target_layer_ids)}. "
                "Remedy: use these layers, or run prepare-data again with another --out."
            )


def _shard_paths(directory: Path) -> list[Path]:
    return sorted(directory.glob("[0-9]*.safetensors"), key=lambda path: int(path.stem))
