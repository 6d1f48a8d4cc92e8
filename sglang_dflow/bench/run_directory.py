"""Finished parts of a measurement, kept so that an interrupted one goes on: settings.json and points.jsonl.

A part is one arm in one repeat: what one server measured, at every concurrency. It is written when it is complete.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflow.bench.client import Load, Request


@dataclass(frozen=True)
class Level:
    """One arm in one repeat at one concurrency.

    Attributes:
        concurrency: requests in flight.
        load: the requests.
        relayed_rows, eligible_rows: of the relay, during this load; 0 without one.
        ram_mb: peak resident memory of the server's processes during this load.
        gpu_mb: peak memory in use on the visible GPUs; None without CUDA.
    """

    concurrency: int
    load: Load
    relayed_rows: int
    eligible_rows: int
    ram_mb: float
    gpu_mb: float | None


@dataclass(frozen=True)
class Part:
    """One arm in one repeat."""

    arm: str
    repeat: int
    levels: tuple[Level, ...]

    def level(self, concurrency: int) -> Level:
        return next(level for level in self.levels if level.concurrency == concurrency)


class RunDirectory:
    """A directory that belongs to one set of settings."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Open a new or an interrupted run.

        Raises:
            ValueError: the directory belongs to other settings; names each that differs.
        """
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        settings = json.loads(json.dumps(settings))  # as they will be read back: tuples are lists
        file = path / "settings.json"
        if file.exists():
            _require_equal(json.loads(file.read_text()), settings, path)
        else:
            file.write_text(json.dumps(settings, indent=1) + "\n")
        self._points = path / "points.jsonl"

    def parts(self) -> list[Part]:
        """Return what is finished, oldest first. A line that a crash cut off is dropped."""
        if not self._points.exists():
            return []
        lines = self._points.read_text().split("\n")
        if lines[-1]:  # no newline: it was cut off, its part is measured again
            self._points.write_text("".join(f"{line}\n" for line in lines[:-1]))
        return [_part(json.loads(line)) for line in lines[:-1]]

    def append(self, part: Part) -> None:
        """Keep a finished part."""
        with self._points.open("a") as sink:
            sink.write(json.dumps(_record(part)) + "\n")


def _require_equal(found: dict[str, Any], expected: dict[str, Any], path: Path) -> None:
    names = [name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name)]
    if names:
        told = "; ".join(f"{name}: there {found.get(name)!r}, now {expected.get(name)!r}" for name in names)
        raise ValueError(
            f"{path} holds a run with other settings ({told}). Give the same command to go on with it, give another "
            "--out, or remove the directory."
        )


def _record(part: Part) -> dict[str, Any]:
    levels = []
    for level in part.levels:
        requests = [request.record() for request in level.load.requests]
        levels.append(vars(level) | {"load": {"requests": requests, "seconds": level.load.seconds}})
    return vars(part) | {"levels": levels}


def _part(record: dict[str, Any]) -> Part:
    levels = []
    for level in record["levels"]:
        requests = [
            Request(**request | {"histogram": tuple(request["histogram"])}) for request in level["load"]["requests"]
        ]
        levels.append(Level(**level | {"load": Load(requests, level["load"]["seconds"])}))
    return Part(**record | {"levels": tuple(levels)})
