"""`sglang-dflow bench serving`: throughput, latency and acceptance of every arm, at every concurrency.

One server at a time: an idle SGLang scheduler keeps a core busy, so two would measure each other. Each repeat starts
every arm's server once, in an order that rotates from repeat to repeat, so that a drift of the machine meets all arms
alike; a finished part is kept, and the same command goes on where it stopped. All arms answer the same greedy
requests; the command fails if their answers differ by more than numerical ties. Last line of output: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import requests

from sglang_dflow.arguments import positive_int
from sglang_dflow.bench import summary
from sglang_dflow.bench.agreement import compare
from sglang_dflow.bench.arms import ALIASES, Arm, make_arms
from sglang_dflow.bench.client import drive
from sglang_dflow.bench.memory import PeakMemory
from sglang_dflow.bench.run_directory import Level, Part, RunDirectory
from sglang_dflow.bench.workload import Workload, add_arguments, command, levels, models, settings, workload
from sglang_dflow.server import Server, ServerSpec, relay_state
from sglang_dflow.verify import progress_lines

WARM_UP_TOKENS = 8


def schedule(arms: Sequence[Arm], repeats: int) -> Iterator[tuple[Arm, int]]:
    """Every (arm, repeat), the order of the arms rotated by one from repeat to repeat."""
    for repeat in range(repeats):
        shift = repeat % len(arms)
        for arm in [*arms[shift:], *arms[:shift]]:
            yield arm, repeat


def flush_cache(url: str) -> None:
    """Empty the server's prefix cache, waiting until it is idle.

    Raises:
        RuntimeError: it does not become idle.
    """
    answer = requests.post(f"{url}/flush_cache", params={"timeout": 30}, timeout=60)
    if answer.status_code != 200:
        raise RuntimeError(f"{url}/flush_cache answered {answer.status_code}: {answer.text[:200]}")


def measure_level(server: Server, asked: Workload, args: argparse.Namespace, concurrency: int, label: str) -> Level:
    """Warm up, then measure one concurrency, from an empty prefix cache."""
    ids = asked.ids[: max(args.requests, concurrency)]
    drive(server.url, ids[:concurrency], concurrency=concurrency, max_new_tokens=WARM_UP_TOKENS)
    flush_cache(server.url)
    before = _relay_rows(server)
    with PeakMemory(server.pid) as memory:
        load = drive(
            server.url,
            ids,
            concurrency=concurrency,
            max_new_tokens=args.max_new_tokens,
            progress=progress_lines(f"{label}, concurrency {concurrency}", len(ids)),
        )
    rows = [after - at_first for after, at_first in zip(_relay_rows(server), before)]
    return Level(concurrency, load, rows[0], rows[1], memory.ram_mb, memory.gpu_mb)


def _relay_rows(server: Server) -> tuple[int, int]:
    """Relayed and eligible rows so far; zeros for a server without a relay."""
    if server.spec.drafter is None or server.spec.algorithm != "DFLOW":
        return 0, 0
    state = relay_state(server.url)
    return state.get("relayed_rows", 0), state.get("eligible_rows", 0)


def measure(run: RunDirectory, arms: Sequence[Arm], asked: Workload, args: argparse.Namespace) -> list[Part]:
    """Measure what is missing; return all parts, oldest first."""
    parts = run.parts()
    known = {(part.arm, part.repeat) for part in parts}
    planned = list(schedule([arm for arm in arms if arm.spec is not None], args.repeats))
    if known:
        print(f"{run.path} holds {len(known)} finished parts; going on", flush=True)
    for number, (arm, repeat) in enumerate(planned, start=1):
        if (arm.name, repeat) in known:
            continue
        print(f"[{number}/{len(planned)}] {arm.name}, repeat {repeat + 1} of {args.repeats}", flush=True)
        assert arm.spec is not None
        log_path = run.path / f"{arm.name.replace(' ', '-')}.log"
        with Server(arm.spec, log=lambda text: print(f"  {text}", flush=True), log_path=log_path) as server:
            measured = [measure_level(server, asked, args, level, arm.name) for level in args.concurrency]
        part = Part(arm.name, repeat, tuple(measured))
        run.append(part)
        parts.append(part)
    return parts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-dflow bench serving", description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--arms", nargs="+", choices=list(ALIASES), default=list(ALIASES), help="default: all")
    parser.add_argument("--concurrency", type=levels, default=levels("1,2,4,8,16,32"), help="default: 1,2,4,8,16,32")
    parser.add_argument("--repeats", type=positive_int, default=3, help="servers per arm (default: %(default)s)")
    parser.add_argument("--dflash", help="DFlash drafter (default: the DFlow drafter without its relay)")
    parser.add_argument("--domino", help="DFlow drafter over a Domino head")
    parser.add_argument("--eagle3", help="EAGLE-3 head; SGLang chooses its steps and tree")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all arms; exit status 1 if their answers differ."""
    args = _parser().parse_args(argv)
    try:
        return _run(args, command("serving", argv))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"sglang-dflow bench serving: {error}", file=sys.stderr, flush=True)
        return 1


def _run(args: argparse.Namespace, line: str) -> int:
    served = models(args)
    asked = workload(args, served.target, max(args.requests, *args.concurrency))
    wanted = [word for word in ALIASES if word in args.arms]
    own = settings(args, served, asked, arms=wanted, concurrency=args.concurrency)
    run = RunDirectory(args.out, own)
    extra_args = shlex.split(args.server_args)
    arms = make_arms(wanted, served, args.out, dtype=args.dtype, extra_args=extra_args)
    for arm in arms:
        if arm.reason is not None:
            print(f"{arm.name}: not run, {arm.reason}", flush=True)
    if not any(arm.spec for arm in arms):
        raise ValueError(f"none of the arms can run here: {', '.join(wanted)}")
    parts = measure(run, arms, asked, args)
    target = ServerSpec(served.target, dtype=args.dtype, extra_args=extra_args)
    agreement = compare(parts, asked.prompts, asked.ids, target)
    record: dict[str, Any] = {
        "arms": [{"arm": arm.name, "runs": arm.spec is not None, "reason": arm.reason} for arm in arms],
        "points": summary.points(parts),
        "comparisons": summary.comparisons(parts),
        "outputs": agreement.record(),
        "settings": own,
        "command": line,
    }
    (args.out / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    _print_table(record)
    for told in agreement.told:
        print(told)
    if agreement.mismatches:
        print(f"FAILED: {agreement.mismatches} answers differ between arms, and not by numerical ties: see above")
    print(json.dumps(record), flush=True)
    return 1 if agreement.mismatches else 0


def _print_table(record: dict[str, Any]) -> None:
    print(
        f"\n{'arm':<18} {'conc.':>5} {'tok/s':>8} {'lowest..highest':>17} {'TTFT ms':>8} {'TPOT ms':>8} "
        f"{'tau':>6}  outputs"
    )
    for p in record["points"]:
        rate = p["tokens_per_s"]
        tau = "-" if p["tau"] is None else f"{p['tau']:.3f}"
        print(
            f"{p['arm']:<18} {p['concurrency']:>5} {rate['median']:>8.2f} "
            f"{rate['lowest']:>7.2f}..{rate['highest']:<8.2f} {p['ttft_ms']['p50']['median']:>8.1f} "
            f"{p['tpot_ms']['p50']['median']:>8.1f} {tau:>6}  {p['output_hash']}"
        )


if __name__ == "__main__":
    sys.exit(main())
