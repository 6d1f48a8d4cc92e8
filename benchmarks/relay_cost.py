"""What a round costs with the relay: rounds of one real server, the relay attached and detached in turn.

usage: python -m benchmarks.relay_cost [--pairs 7] [--requests 6] [--max-new-tokens 48] [--dtype float32] [--out DIR]

The CPU platform, concurrency 1. Every prompt is sent twice in a row, and the server (by the plugin `relay_toggle.py`,
loaded for this run only) serves one of the two without its relay pool: the host's DFLASH round on the same weights. A
pair is one pass over the prompts, in which the order of the two sides alternates from pair to pair. Reported is the
median over pairs, with all pairs in the JSON line that ends the output. Exit status 1 if the sides' outputs differ.

Two servers, one for each side, were tried first: one start differs from the next by more than the relay costs (six
pairs on a quiet machine, commit 0d9a433: 0.953, 1.106, 1.114, 1.119, 0.887, 1.030).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import relay_toggle
from sglang_dflow.arguments import positive_int
from sglang_dflow.bench.arms import make_arms
from sglang_dflow.bench.client import drive
from sglang_dflow.bench.cost_probe import install
from sglang_dflow.bench.workload import add_arguments, models, settings, workload
from sglang_dflow.server import Server, has_cuda

ROOT = Path(__file__).resolve().parents[1]


class Round(NamedTuple):
    """One decode round."""

    request: int  # counts the server's prefills
    relay: bool
    seconds: float


class Pair(NamedTuple):
    """One pass over the prompts, mean milliseconds of a round."""

    dflash_ms: float
    dflow_ms: float

    @property
    def ratio(self) -> float:
        return self.dflow_ms / self.dflash_ms


def read_rounds(trace: Path) -> list[Round]:
    """Read the plugin's trace."""
    return [Round(*json.loads(line)) for line in trace.read_text().splitlines()]


def pair_of(rounds: Sequence[Round]) -> Pair:
    """Return the mean round of either side.

    Raises:
        RuntimeError: a side served nothing: the plugin did not switch.
    """
    sides = {relay: [1e3 * one.seconds for one in rounds if one.relay == relay] for relay in (False, True)}
    if not all(sides.values()):
        raise RuntimeError(f"rounds with and without the relay: {len(sides[True])}, {len(sides[False])}; expected both")
    return Pair(statistics.fmean(sides[False]), statistics.fmean(sides[True]))


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The figures of the JSON line; `spread` is the lowest and the highest ratio of a pair."""
    ratios = [pair.ratio for pair in pairs]
    return {
        "dflash_round_ms": round(statistics.median(pair.dflash_ms for pair in pairs), 3),
        "dflow_round_ms": round(statistics.median(pair.dflow_ms for pair in pairs), 3),
        "ratio": round(statistics.median(ratios), 4),
        "spread": [round(min(ratios), 4), round(max(ratios), 4)],
        "pairs": [[round(value, 3) for value in pair] for pair in pairs],
    }


def measure(server: Server, trace: Path, prompts_ids: Sequence[Sequence[int]], *, max_new_tokens: int) -> Pair:
    """Send every prompt twice in a row, once more the first one so that the next pass begins with the other side.

    Raises:
        RuntimeError: the two answers to a prompt differ.
    """
    trace.write_text("")
    for ids in prompts_ids:
        first, second = drive(server.url, [ids, ids], concurrency=1, max_new_tokens=max_new_tokens).requests
        if first.output_ids != second.output_ids:
            raise RuntimeError("the answers with and without the relay differ: a bug, run `sglang-dflow verify`")
    pair = pair_of(read_rounds(trace))
    drive(server.url, prompts_ids[:1], concurrency=1, max_new_tokens=1)
    return pair


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.relay_cost", description=(__doc__ or "").splitlines()[0]
    )
    add_arguments(parser)
    parser.add_argument("--pairs", type=positive_int, default=7, help="default: %(default)s")
    parser.set_defaults(requests=6, max_new_tokens=48, out=Path("runs/relay_cost"))
    args = parser.parse_args(argv)

    if has_cuda():
        print(
            "benchmarks.relay_cost: it switches between draft graphs of the CPU platform, and this machine has "
            "CUDA. Measure there with `sglang-dflow bench serving` and `sglang-dflow bench cost`",
            file=sys.stderr,
        )
        return 1
    served = models(args)
    asked = workload(args, served.target, args.requests)
    args.out.mkdir(parents=True, exist_ok=True)
    extra = ("--max-total-tokens", "8192", *args.server_args.split())
    (arm,) = make_arms(["dflow"], served, args.out, dtype=args.dtype, extra_args=extra)
    assert arm.spec is not None
    trace = args.out.resolve() / "rounds.jsonl"
    path = os.pathsep.join((install(args.out.resolve(), relay_toggle.__name__), str(ROOT)))
    spec = replace(arm.spec, env={"PYTHONPATH": path, relay_toggle.VARIABLE: str(trace)})
    pairs: list[Pair] = []
    try:
        with Server(spec, log_path=args.out / "server.log") as server:
            # Captures the graphs and packs the weights of both sides.
            drive(server.url, asked.ids[:1] * 4, concurrency=1, max_new_tokens=16)
            for _ in range(args.pairs):
                pairs.append(measure(server, trace, asked.ids, max_new_tokens=args.max_new_tokens))
                print(f"  {pairs[-1].dflash_ms:.2f} and {pairs[-1].dflow_ms:.2f} ms, {pairs[-1].ratio:.4f}", flush=True)
    except RuntimeError as error:
        print(f"benchmarks.relay_cost: {error}", file=sys.stderr, flush=True)
        return 1
    figures = summary(pairs)
    print(f"\n{'round of':<8} {'ms':>8}\n{'DFLASH':<8} {figures['dflash_round_ms']:>8.2f}")
    print(f"{'DFLOW':<8} {figures['dflow_round_ms']:>8.2f}   ratio {figures['ratio']:.4f}, {figures['spread']}")
    print(json.dumps(figures | {"settings": settings(args, served, asked), "argv": sys.argv[1:]}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
