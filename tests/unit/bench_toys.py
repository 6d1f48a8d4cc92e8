"""Made-up measurements for the tests of the sweep and its report."""

from __future__ import annotations

from sglang_dflow.bench.client import Load, Request
from sglang_dflow.bench.run_directory import Level, Part


def request(tokens: int = 9, rounds: int = 0, histogram: tuple[int, ...] = (), first: int = 0) -> Request:
    """One answer of `tokens` tokens, the first of them `first`: 0.1 s to the first token, 0.9 s in all."""
    return Request([first, *range(1, tokens)], 0.1, 0.9, rounds, histogram)


def level(requests: list[Request], seconds: float, concurrency: int = 1, relayed: int = 0, eligible: int = 0) -> Level:
    """One load of an arm whose server took 100 MB."""
    return Level(concurrency, Load(requests, seconds), relayed, eligible, 100.0, None)


def sweep() -> list[Part]:
    """Three arms, two repeats, concurrency 1 and 4, two requests each: 18 tokens in 2, 1.2 and 1 s; repeat 1 slower."""
    parts = []
    for repeat in range(2):
        for arm, seconds, rounds, histogram in (
            ("no speculation", 2.0, 0, ()),
            ("DFLASH", 1.2, 6, (3, 3)),
            ("DFLOW", 1.0, 5, (1, 4)),
        ):
            requests = [request(9, rounds, histogram), request(9, rounds, histogram)]
            relayed = (3, 4) if arm == "DFLOW" else (0, 0)
            levels = [level(requests, seconds * (1 + repeat) / c, c, *relayed) for c in (1, 4)]
            parts.append(Part(arm, repeat, tuple(levels)))
    return parts
