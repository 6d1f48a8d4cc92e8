"""What every draft must have found, derived from the trace of a real server by the life of each request alone.

The model knows requests, not slots: a request that prefilled (also inside a mixed chunk, or after a retraction) has
nothing to relay; one that verified a block has `B-1-a` rows at exactly the position behind it (`first_rejection`,
mask predictor). Whatever a slot's earlier owner left must not show.
"""

from __future__ import annotations

import enum
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests


class Life(enum.StrEnum):
    """What can happen to a request."""

    FIRST_ROUND = "first round after a prefill"
    NOTHING_ACCEPTED = "no draft accepted"
    PARTIAL_ACCEPT = "some drafts accepted"
    LAST_ROW_REJECTED = "all but the last draft accepted"
    FULL_ACCEPT = "all drafts accepted"
    DIFFERENT_ACCEPT_LENGTHS = "two requests of a batch with different accept lengths"
    JOIN = "a request's first draft beside requests that decode already"
    MIXED_CHUNK = "a decoding request advances inside a mixed chunk"
    RESUMED = "a request prefills again after a retraction"
    SLOT_REUSE = "a request drafts in a slot of an earlier one"
    FORGOTTEN = "relayed states forgotten (cache flush, weight update)"
    SWITCHED_OFF = "a draft while the relay is off"


@dataclass
class Lives:
    """What a trace shows.

    Attributes:
        seen: how often each life was met.
        wrong: drafts that did not relay the expected number of rows, in words.
        rounds: verified blocks of each request: (prefix length, accepted drafts, relayed rows).
        slots: the last slot of each request.
    """

    seen: Counter[Life] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    rounds: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)


def read_lives(path: Path, *, block_size: int) -> Lives:
    """Follow all requests of a trace of `dflow_probe_lives`."""
    reader = _Reader(block_size)
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        getattr(reader, f"see_{entry['kind']}")(entry)
    return reader.lives


def wait_until_idle(url: str) -> None:
    """Return when no request runs or waits: with overlap a slot's last block comes after its request's answer."""
    for _ in range(200):
        loads = requests.get(f"{url}/v1/loads", timeout=60).json()["loads"]
        if not any(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads):
            return
        time.sleep(0.1)
    raise AssertionError("the server is still busy")


class _Reader:
    def __init__(self, block_size: int) -> None:
        self.block_size, self.lives = block_size, Lives()
        self.relayable: dict[str, tuple[int, int]] = {}  # request -> (P', rows) of its last block
        self.owner: dict[int, str] = {}  # slot -> last request

    def see_extend(self, entry: dict[str, Any]) -> None:
        for rid, slot, length in zip(entry["rids"], entry["slots"], entry["extend_lens"], strict=True):
            if rid in self.lives.rounds:
                # Of a decoding request a mixed chunk holds one token; a resumed one prefills what it had, mixed or not.
                self.lives.seen[Life.MIXED_CHUNK if length == 1 else Life.RESUMED] += 1
            self.relayable.pop(rid, None)
            self._take_slot(rid, slot)

    def see_forget(self, entry: dict[str, Any]) -> None:
        self.lives.seen[Life.FORGOTTEN] += 1
        self.relayable.clear()

    def see_round(self, entry: dict[str, Any]) -> None:
        known = [rid in self.lives.rounds for rid in entry["rids"]]
        self.lives.seen[Life.JOIN] += any(known) and not all(known)
        columns = (entry[name] for name in ("rids", "slots", "prefix_lens", "accept_lens", "relayed"))
        for rid, slot, prefix_len, accept_len, relayed in zip(*columns, strict=True):
            self._take_slot(rid, slot)
            position, rows = self.relayable.get(rid, (prefix_len, 0))
            expected = rows if entry["enabled"] else 0
            if position != prefix_len:
                self.lives.wrong.append(f"{rid} drafts at {prefix_len}, but its last block ended at {position}")
            elif relayed != expected:
                self.lives.wrong.append(f"{rid} in slot {slot} at {prefix_len} relayed {relayed} rows, not {expected}")
            self._count(rid, accept_len, enabled=entry["enabled"])
            self.lives.rounds.setdefault(rid, []).append((prefix_len, accept_len, relayed))
            self.relayable[rid] = (prefix_len + accept_len + 1, self.block_size - 1 - accept_len)
        if len(set(entry["accept_lens"])) > 1:
            self.lives.seen[Life.DIFFERENT_ACCEPT_LENGTHS] += 1

    def _count(self, rid: str, accept_len: int, *, enabled: bool) -> None:
        last = self.block_size - 1
        kinds = {0: Life.NOTHING_ACCEPTED, last: Life.FULL_ACCEPT, last - 1: Life.LAST_ROW_REJECTED}
        self.lives.seen[kinds.get(accept_len, Life.PARTIAL_ACCEPT)] += 1
        self.lives.seen[Life.FIRST_ROUND] += rid not in self.relayable
        self.lives.seen[Life.SWITCHED_OFF] += not enabled

    def _take_slot(self, rid: str, slot: int) -> None:
        if self.owner.get(slot, rid) != rid:
            self.lives.seen[Life.SLOT_REUSE] += 1
        self.owner[slot], self.lives.slots[rid] = rid, slot
