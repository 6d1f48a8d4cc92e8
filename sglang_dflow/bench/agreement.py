"""Do all arms give the same greedy answers? Differences are told apart: numerical ties, or a fault.

The reference is the first arm (no speculation, where it was measured), first repeat, same concurrency. A difference is
judged as `sglang-dflow verify` does: by the target's own log-probabilities of the two tokens where the answers part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sglang_dflow.bench.run_directory import Part
from sglang_dflow.bench.summary import output_hash
from sglang_dflow.prompts import Prompt
from sglang_dflow.server import Server, ServerSpec
from sglang_dflow.verify import TIE_NATS, Completion, describe_difference, explain_difference


class Pair(NamedTuple):
    """Two answers to one prompt that differ. Where: the first arm and concurrency that gave `found`."""

    prompt: int
    expected: tuple[int, ...]
    found: tuple[int, ...]
    where: str


@dataclass(frozen=True)
class Agreement:
    """What the comparison of all outputs found.

    Attributes:
        hashes: arm -> hash of its outputs at all concurrencies, first repeat.
        ties: differing answers that the dtype's rounding explains.
        mismatches: other differing answers; any is a fault.
        told: one line for each.
    """

    hashes: dict[str, str]
    ties: int = 0
    mismatches: int = 0
    told: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"equal": not self.ties and not self.mismatches}


def differing(parts: Sequence[Part]) -> list[Pair]:
    """Return every distinct pair of differing answers."""
    pairs: dict[tuple[Any, ...], Pair] = {}
    for pair in _pairs(parts):
        pairs.setdefault(pair[:3], pair)
    return list(pairs.values())


def _pairs(parts: Sequence[Part]) -> Iterator[Pair]:
    for part in parts[1:]:
        for reference, level in zip(parts[0].levels, part.levels):
            for number, (a, b) in enumerate(zip(reference.load.requests, level.load.requests)):
                if a.output_ids != b.output_ids:
                    where = f"{part.arm}, repeat {part.repeat}, concurrency {level.concurrency}"
                    yield Pair(number, tuple(a.output_ids), tuple(b.output_ids), where)


def compare(
    parts: Sequence[Part], prompts: Sequence[Prompt], prompts_ids: Sequence[Sequence[int]], target: ServerSpec
) -> Agreement:
    """Compare all outputs; starts `target`, a server without speculation, only to explain differences."""
    firsts = {part.arm: part for part in reversed(parts)}
    hashes = {arm: output_hash(firsts[arm].levels) for arm in dict.fromkeys(part.arm for part in parts)}
    pairs = differing(parts)
    if not pairs:
        return Agreement(hashes)
    print(f"{len(pairs)} differing answers: asking the target about them", flush=True)
    with Server(target) as server:
        found = [
            explain_difference(
                server.url,
                prompts[pair.prompt],
                prompts_ids[pair.prompt],
                Completion(pair.expected, 0),
                Completion(pair.found, 0),
                tie_nats=TIE_NATS[target.dtype],
            )
            for pair in pairs
        ]
    told = tuple(describe_difference(one, pair.where) for pair, one in zip(pairs, found))
    ties = sum(one.tie for one in found)
    return Agreement(hashes, ties, len(found) - ties, told)
