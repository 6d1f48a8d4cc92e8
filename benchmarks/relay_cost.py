"""What a round costs with the relay: DFLOW against DFLASH on the same drafter, real servers, pair by pair.

usage: python -m benchmarks.relay_cost [--pairs 7] [--requests 6] [--max-new-tokens 64] [--dtype float32] [--out DIR]

DFLASH is the drafter without its relay, DFLOW the drafter as it is. For every pair both servers are started anew, in
alternating order, and answer the same prompts at concurrency 1 in turn: the first, the second, the second, the first.
The one that waits is stopped (SIGSTOP), so that its scheduler's polling takes no core. New servers for every pair, so that
a lucky start cannot decide all pairs (one start of both gave 0.971 to 0.991 in four pairs: below 1, which cannot be the relay).

A round's time is the time from the first token to the end of an answer over its verify steps, summed over the prompts.
Reported is the median over pairs, with all pairs in the JSON line that ends the output. Exit status 1 if the arms'
outputs differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflow.arguments import positive_int
from sglang_dflow.bench.arms import DFLASH, DFLOW, Arm, make_arms
from sglang_dflow.bench.client import Request, drive
from sglang_dflow.bench.workload import add_arguments, models, settings, workload
from sglang_dflow.cli import exit_on_signal
from sglang_dflow.server import Server


class Pair(NamedTuple):
    """One measurement of both arms, milliseconds per round."""

    dflash_ms: float
    dflow_ms: float

    @property
    def ratio(self) -> float:
        return self.dflow_ms / self.dflash_ms


def round_ms(requests: Sequence[Request]) -> float:
    """Mean milliseconds of a decode round over all requests."""
    seconds = sum(request.latency_s - request.ttft_s for request in requests)
    return 1e3 * seconds / sum(request.rounds for request in requests)


@contextlib.contextmanager
def running(server: Server) -> Iterator[None]:
    """Let a stopped server run for a while."""
    os.killpg(server.pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(server.pid, signal.SIGSTOP)


def _answer(server: Server, prompts_ids: Sequence[Sequence[int]], max_new_tokens: int) -> list[Request]:
    with running(server):
        return drive(server.url, prompts_ids, concurrency=1, max_new_tokens=max_new_tokens).requests


@contextlib.contextmanager
def serving(arms: Sequence[Arm], logs: Path) -> Iterator[dict[str, Server]]:
    """Start the arms' servers one after the other, and leave all of them stopped."""
    with contextlib.ExitStack() as stack:
        servers = {}
        for arm in arms:
            assert arm.spec is not None
            server = stack.enter_context(Server(arm.spec, log_path=logs / f"{arm.name}.log"))
            # A stopped process does not act on the signal that ends it.
            stack.callback(os.killpg, server.pid, signal.SIGCONT)
            os.killpg(server.pid, signal.SIGSTOP)
            servers[arm.name] = server
        yield servers


def measure(servers: dict[str, Server], prompts_ids: Sequence[Sequence[int]], *, max_new_tokens: int) -> Pair:
    """Return the pair of one start; one prompt before it captures graphs and packs weights.

    Raises:
        RuntimeError: the arms' outputs differ.
    """
    for server in servers.values():
        _answer(server, prompts_ids[:1], max_new_tokens)
    found: dict[str, list[Request]] = {name: [] for name in servers}
    for name in (*servers, *reversed(servers)):
        found[name] += _answer(servers[name], prompts_ids, max_new_tokens)
    dflash, dflow = found[DFLASH], found[DFLOW]
    if [request.output_ids for request in dflash] != [request.output_ids for request in dflow]:
        raise RuntimeError("the arms' outputs differ: this is a bug, run `sglang-dflow verify`")
    return Pair(round_ms(dflash), round_ms(dflow))


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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.relay_cost", description=(__doc__ or "").splitlines()[0]
    )
    add_arguments(parser)
    parser.add_argument("--pairs", type=positive_int, default=7, help="default: %(default)s")
    parser.set_defaults(requests=6, max_new_tokens=64, out=Path("runs/relay_cost"))
    args = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):  # a run that is ended must not leave stopped servers
        signal.signal(number, exit_on_signal)

    served = models(args)
    asked = workload(args, served.target, args.requests)
    args.out.mkdir(parents=True, exist_ok=True)
    extra = ("--max-total-tokens", "8192", *args.server_args.split())
    arms = make_arms(["dflash", "dflow"], served, args.out, dtype=args.dtype, extra_args=extra)
    pairs: list[Pair] = []
    try:
        for _ in range(args.pairs):
            with serving(arms, args.out) as servers:
                pairs.append(measure(servers, asked.ids, max_new_tokens=args.max_new_tokens))
            pair = pairs[-1]
            print(f"  {pair.dflash_ms:.2f} and {pair.dflow_ms:.2f} ms per round, {pair.ratio:.4f}", flush=True)
            arms.reverse()
    except RuntimeError as error:
        print(f"benchmarks.relay_cost: {error}", file=sys.stderr, flush=True)
        return 1
    figures = summary(pairs)
    print(f"\n{'arm':<8} {'ms per round':>12}\n{'DFLASH':<8} {figures['dflash_round_ms']:>12.2f}")
    print(f"{'DFLOW':<8} {figures['dflow_round_ms']:>12.2f}   ratio {figures['ratio']:.4f}, {figures['spread']}")
    print(json.dumps(figures | {"settings": settings(args, served, asked), "argv": sys.argv[1:]}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
