"""`sglang-dflow bench cost`: where the time of a round goes, with the relay and without it.

Starts a DFLOW server with the timers of `cost_probe.py`, once with its relay and once with the relay off, and drives it
like the sweep. Counted are rounds at full concurrency that follow a round of the same requests without a prefill in
between; a round's time is from the start of one to the start of the next, and what is outside the worker is the
scheduler's. On the CPU platform the draft runs eagerly here, so that the relay can be timed. Writes cost.json into the
run directory. Last line of output: the same JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sglang_dflow.bench.arms import make_arms
from sglang_dflow.bench.client import drive
from sglang_dflow.bench.cost_probe import PARTS, VARIABLE, install
from sglang_dflow.bench.workload import Workload, add_arguments, command, levels, models, settings, workload
from sglang_dflow.cpu import GRAPH_SWITCH
from sglang_dflow.server import Server, ServerSpec, has_cuda
from sglang_dflow.serving.settings import RelaySettings

ALL_PARTS = (*dict.fromkeys(PARTS.values()), "worker", "scheduler")
RELAY_PARTS = ("relay apply", "relay store")

Record = dict[str, Any]


def rounds(trace: Sequence[Record], concurrency: int) -> Iterator[dict[str, float]]:
    """Seconds by part of every round that counts."""
    for this, following in pairwise(trace):
        if this["decodes"] and following["decodes"] and this["requests"] == following["requests"] == concurrency:
            yield this["parts"] | {"scheduler": following["start"] - this["end"]}


def stack(trace: Sequence[Record], concurrency: int, *, expected: Sequence[str] = ("verify", "draft")) -> Record:
    """Mean milliseconds by part, the round's, and the relay's share of the round (median, 10th and 90th percentile).

    Raises:
        RuntimeError: no round counts, or the timer of an `expected` part saw nothing.
    """
    table = np.array([[one.get(part, 0.0) for part in ALL_PARTS] for one in rounds(trace, concurrency)])
    if not len(table):
        raise RuntimeError(f"no round with {concurrency} requests in {len(trace)} traced calls; give more --requests")
    blind = [part for part in expected if not table[:, ALL_PARTS.index(part)].any()]
    if blind:
        raise RuntimeError(f"the timers of {blind} saw nothing: the host's methods are not those of cost_probe.py")
    whole = table.sum(axis=1)
    relay = table[:, [ALL_PARTS.index(part) for part in RELAY_PARTS]].sum(axis=1)
    return {
        "rounds": len(table),
        "parts_ms": {part: round(1e3 * float(mean), 4) for part, mean in zip(ALL_PARTS, table.mean(axis=0))},
        "round_ms": _percentiles(1e3 * whole) | {"mean": round(1e3 * float(whole.mean()), 4)},
        "relay_ms": _percentiles(1e3 * relay),
        "relay_share": _percentiles(relay / whole),
    }


def _percentiles(values: Any) -> dict[str, float]:
    low, median, high = (round(float(value), 5) for value in np.percentile(values, [10, 50, 90]))
    return {"median": median, "p10": low, "p90": high}


def measure(
    spec: ServerSpec, asked: Workload, concurrencies: Sequence[int], args: argparse.Namespace, scratch: Path
) -> list[Record]:
    """Return one stack per concurrency, from one instrumented server."""
    trace = scratch / "trace.jsonl"
    # The CPU platform's draft graph would hold the relay's time within the draft's. (A CUDA graph does; it stays.)
    env = {**spec.env, "PYTHONPATH": install(scratch), VARIABLE: str(trace), GRAPH_SWITCH: "off"}
    expected = ["verify", "draft"]
    if RelaySettings.VARIABLE not in spec.env and not has_cuda():
        expected += RELAY_PARTS
    found = []
    with Server(replace(spec, env=env), log_path=args.out / "cost.log") as server:
        for concurrency in concurrencies:
            ids = asked.ids[: max(args.requests, concurrency)]
            drive(server.url, ids[:concurrency], concurrency=concurrency, max_new_tokens=8)
            trace.write_text("")
            drive(server.url, ids, concurrency=concurrency, max_new_tokens=args.max_new_tokens)
            lines = [json.loads(line) for line in trace.read_text().splitlines()]
            found.append({"concurrency": concurrency} | stack(lines, concurrency, expected=expected))
            print(f"  concurrency {concurrency}: {found[-1]['rounds']} rounds", flush=True)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-dflow bench cost", description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--concurrency", type=levels, default=levels("1,8,32"), help="default: 1,8,32")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both stacks."""
    args = _parser().parse_args(argv)
    try:
        _run(args, command("cost", argv))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"sglang-dflow bench cost: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _run(args: argparse.Namespace, line: str) -> None:
    served = models(args)
    asked = workload(args, served.target, max(args.requests, *args.concurrency))
    args.out.mkdir(parents=True, exist_ok=True)
    arms = make_arms(
        ["relay-off", "dflow"], served, args.out, dtype=args.dtype, extra_args=shlex.split(args.server_args)
    )
    stacks = []
    for arm in arms:
        assert arm.spec is not None
        print(f"{arm.name}, instrumented", flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            measured = measure(arm.spec, asked, args.concurrency, args, Path(scratch))
        stacks += [{"arm": arm.name} | one for one in measured]
    record = {"stacks": stacks, "settings": settings(args, served, asked), "command": line}
    (args.out / "cost.json").write_text(json.dumps(record, indent=1) + "\n")
    _print_table(stacks)
    print(json.dumps(record), flush=True)


def _print_table(stacks: Sequence[Record]) -> None:
    print(f"\n{'arm':<16} {'conc.':>5} {'round ms':>8} {'relay':>6}  " + " ".join(f"{part:>11}" for part in ALL_PARTS))
    for one in stacks:
        parts = " ".join(f"{one['parts_ms'][part]:>11.3f}" for part in ALL_PARTS)
        share = f"{one['relay_share']['median']:.1%}"
        print(f"{one['arm']:<16} {one['concurrency']:>5} {one['round_ms']['mean']:>8.2f} {share:>6}  {parts}")


if __name__ == "__main__":
    sys.exit(main())
