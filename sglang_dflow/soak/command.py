"""`sglang-dflow soak`: many different requests to one live DFLOW server, every greedy one checked.

The reference is the same target without speculation, asked first. Float32, so that equal means equal; what differs is
tried to be a numerical tie as in `sglang-dflow verify`. A mismatch is shrunk to a small workload that still shows it
and written to a file that `--replay` runs again. Last line of output: one JSON object. Exit status 1 on a mismatch, a
hang, a failed request, or a server that is not healthy, idle and empty at the end.
"""

from __future__ import annotations

import argparse
import json
import operator
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import requests

from sglang_dflow.arguments import positive_int
from sglang_dflow.demo import DEMO_DRAFTER
from sglang_dflow.demo_model import ensure_demo_target
from sglang_dflow.prompts import varied_prompts
from sglang_dflow.provenance import versions
from sglang_dflow.server import Server, ServerSpec, relay_state, set_relay
from sglang_dflow.soak.check import (
    Expected,
    Key,
    Mismatch,
    find_mismatches,
    is_checked,
    key,
    load_of,
    metric_total,
    server_problems,
    slope_per_1000,
)
from sglang_dflow.soak.client import Answer, send, send_burst
from sglang_dflow.soak.shrink import shrink
from sglang_dflow.soak.workload import Burst, Request, from_json, make_workload, to_json

# Room for one longest request, or for the prompts of a pressure burst but not for its answers; admitted as if every
# answer ended at once, so that decoding runs out of KV and retracts. Chunks are shorter than the long prompts. Of up to
# 32 requests at a time every draft graph is captured early; the one of 48 came after 2,700 requests and took 17 MB.
PRESSURE_ARGS = (
    *("--max-total-tokens", "2304", "--schedule-conservativeness", "0.01"),
    *("--max-running-requests", "32"),
    *("--page-size", "16", "--chunked-prefill-size", "256", "--enable-mixed-chunk", "--enable-metrics"),
)
# With these glibc gives every larger buffer back at once. By default what it keeps for later swings by 100 MB, which
# hides growth; the page faults cost a quarter of the speed.
STEADY_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
REFERENCE_ARGS = ("--max-total-tokens", "24576")
_REFERENCE_CONCURRENCY = 24
_SHRINK_TRIES = 60
_SWITCH_AFTER_S = 0.7
_LOOKS, _BETWEEN_LOOKS_S = 4, 0.2
MAX_SLOPE_MB = 1.0
SETTLED_REQUESTS = 2000
"""A soak of so many requests or more fails if its server grows by more MB per 1,000; shorter ones are all warm-up."""


@dataclass
class Outcome:
    """What the soak saw so far.

    Attributes:
        answers: every request with its answer.
        mismatches: greedy answers that are not the target's, ties included.
        memory: (requests answered, resident MB of the server's processes), after every burst.
        anonymous: the same of each process alone, without pages that a file backs.
        stopped: the server answers no more.
    """

    answers: list[tuple[Request, Answer]] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    memory: list[tuple[int, float]] = field(default_factory=list)
    anonymous: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    stopped: bool = False

    @property
    def wrong(self) -> list[Mismatch]:
        """The mismatches that are no ties."""
        return [mismatch for mismatch in self.mismatches if not mismatch.tie]

    @property
    def hangs(self) -> int:
        return sum(answer.hangs for _, answer in self.answers)

    @property
    def failures(self) -> list[str]:
        """Requests without an answer, or with a bad one."""
        return [
            f"request {request.name}: {answer.error or answer.bad}"
            for request, answer in self.answers
            if answer.error or answer.bad
        ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-dflow soak", description="Many different requests to one live DFLOW server, greedy ones checked."
    )
    parser.add_argument("--requests", type=positive_int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="target (default: the demo target)")
    parser.add_argument("--drafter", type=Path, default=DEMO_DRAFTER, help="DFlow drafter (default: the demo drafter)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a request hangs")
    parser.add_argument("--replay", type=Path, help="a workload file that a failed soak wrote")
    parser.add_argument("--out", type=Path, default=Path("."), help="where a failing workload is written")
    parser.add_argument("--server-args", default="", help="further sglang.launch_server arguments, one string")
    return parser


def corpus(model: Path) -> list[int]:
    """Token ids of the built-in prompts, one after another."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [token for prompt in varied_prompts() for token in prompt.token_ids(tokenizer)]


def _progress(label: str, total: int) -> Callable[[int], None]:
    last = time.monotonic()

    def told(done: int) -> None:
        nonlocal last
        if done == total or time.monotonic() - last > 10.0:
            last = time.monotonic()
            print(f"  {label}: {done}/{total}", flush=True)

    return told


def reference_answers(url: str, bursts: Sequence[Burst], *, timeout_s: float) -> Expected:
    """Ask a server without speculation every greedy request once."""
    greedy = {key(request): request for burst in bursts for request in burst.requests if request.is_greedy}
    answers: dict[Key, tuple[int, ...]] = {}
    told = _progress("reference", len(greedy))

    def ask(request: Request) -> Answer:
        return send(url, request.whole(), timeout_s=timeout_s)

    with ThreadPoolExecutor(max_workers=_REFERENCE_CONCURRENCY) as clients:
        for asked, answer in zip(greedy, clients.map(ask, greedy.values())):
            if answer.error is not None:
                raise RuntimeError(f"the reference server failed on request {greedy[asked].name}: {answer.error}")
            answers[asked] = answer.outputs[0]
            told(len(answers))
    return answers


def run_bursts(
    server: Server, bursts: Sequence[Burst], expected: Expected, *, timeout_s: float, progress: Callable[[int], None]
) -> Outcome:
    """Send one burst after another; stop at a hang, or when the server stops."""
    outcome = Outcome()
    for burst in bursts:
        try:
            _run_burst(server, burst, expected, outcome, timeout_s=timeout_s)
        except requests.RequestException:
            outcome.stopped = True
        progress(len(outcome.answers))
        if outcome.hangs or outcome.stopped:
            break
    return outcome


def _run_burst(server: Server, burst: Burst, expected: Expected, outcome: Outcome, *, timeout_s: float) -> None:
    if burst.flush:
        requests.post(f"{server.url}/flush_cache", params={"timeout": 20}, timeout=60).raise_for_status()
    with ThreadPoolExecutor(max_workers=1) as switcher:
        switched = switcher.submit(_switch_relay, server.url, burst.relay)
        pairs = list(zip(burst.requests, send_burst(server.url, burst, timeout_s=timeout_s)))
        switched.result()
    outcome.answers += pairs
    requests.get(f"{server.url}/health", timeout=timeout_s).raise_for_status()
    outcome.mismatches += find_mismatches(expected, pairs, tie_url=server.url)
    _record_memory(outcome, server.pid)


def _switch_relay(url: str, enabled: bool | None) -> None:
    if enabled is not None:
        time.sleep(_SWITCH_AFTER_S)
        set_relay(url, enabled)


def _record_memory(outcome: Outcome, pid: int) -> None:
    """Resident memory of all processes of the server, and of each what is not backed by a file.

    Pages of libraries come and go with what else the machine runs; a leak is in the others. The lowest of a few looks
    counts: right behind a burst the server may still be busy with aborted requests.
    """
    answered = len(outcome.answers)
    total, by_process = min((_look(pid) for _ in range(_LOOKS)), key=operator.itemgetter(0))
    outcome.memory.append((answered, total))
    for name, anonymous in by_process.items():
        outcome.anonymous.setdefault(name, []).append((answered, anonymous))


def _look(pid: int) -> tuple[float, dict[str, float]]:
    time.sleep(_BETWEEN_LOOKS_S)
    tree = psutil.Process(pid)
    used = {f"{one.name()} {one.pid}": one.memory_info() for one in (tree, *tree.children(recursive=True))}
    anonymous = {name: (info.rss - info.shared) / 1e6 for name, info in used.items()}
    return sum(info.rss for info in used.values()) / 1e6, anonymous


def _shrunk(server: Server, bursts: Sequence[Burst], expected: Expected, *, timeout_s: float) -> list[Burst]:
    """The smallest part found that still mismatches, or the whole workload if the mismatch does not come back."""
    items = [(number, request) for number, burst in enumerate(bursts) for request in burst.requests]

    def rebuilt(kept: Sequence[tuple[int, Request]]) -> list[Burst]:
        parts = []
        for number, burst in enumerate(bursts):
            members = tuple(request for other, request in kept if other == number)
            if members:
                parts.append(Burst(members, flush=True, relay=burst.relay))
        return parts

    def fails(kept: Sequence[tuple[int, Request]]) -> bool:
        outcome = run_bursts(server, rebuilt(kept), expected, timeout_s=timeout_s, progress=lambda done: None)
        return bool(outcome.wrong)

    if not fails(items):
        return list(bursts)
    return rebuilt(shrink(items, fails, max_tries=_SHRINK_TRIES))


def _write_failure(
    path: Path, server: Server, bursts: Sequence[Burst], outcome: Outcome, expected: Expected, *, timeout_s: float
) -> None:
    print("shrinking the workload to what still shows a mismatch", flush=True)
    failed = {mismatch.request.name for mismatch in outcome.wrong}
    last = max(number for number, burst in enumerate(bursts) if failed & {one.name for one in burst.requests})
    # First the failing burst alone, then everything up to it: most failures need no history.
    small = _shrunk(server, bursts[last : last + 1], expected, timeout_s=timeout_s)
    if small == list(bursts[last : last + 1]):
        small = _shrunk(server, bursts[: last + 1], expected, timeout_s=timeout_s)
    path.write_text(json.dumps(to_json(small)))
    count = sum(len(burst.requests) for burst in small)
    print(f"{count} request(s) left: run them again with `sglang-dflow soak --replay {path}`", flush=True)


def _read_out(server: Server, outcome: Outcome) -> tuple[list[str], dict[str, Any]]:
    """What is wrong besides mismatches, and the server's own numbers; none of a server that hangs or stopped."""
    problems, numbers = outcome.failures, dict[str, Any]()
    if outcome.stopped:
        problems.append(f"the server stopped answering after {len(outcome.answers)} requests: {server.log_path}")
    elif not outcome.hangs:
        problems += server_problems(server.url)
        retractions = int(metric_total(server.url, "sglang:num_retracted_requests_total"))
        numbers = {"retractions": retractions, **load_of(relay_state(server.url))}
    slope = slope_per_1000(outcome.memory)
    if slope is not None and slope > MAX_SLOPE_MB and len(outcome.answers) >= SETTLED_REQUESTS:
        problems.append(f"the server grows by {slope:.2f} MB per 1,000 requests, expected at most {MAX_SLOPE_MB}")
    slopes = {name: slope_per_1000(samples) for name, samples in outcome.anonymous.items()}
    told = {name: round(value, 3) for name, value in slopes.items() if value is not None}
    memory = {"rss_slope_mb_per_1000": None if slope is None else round(slope, 3), "anonymous_slope_by_process": told}
    return problems, {**memory, **numbers}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; see the module docstring."""
    args = _parser().parse_args(argv)
    model = ensure_demo_target() if args.model is None else args.model
    if args.replay is not None:
        bursts = from_json(json.loads(args.replay.read_text()))
    else:
        bursts = make_workload(args.seed, args.requests, corpus(model))
    total, began = sum(len(burst.requests) for burst in bursts), time.monotonic()
    common: dict[str, Any] = {"model": str(model), "dtype": "float32"}
    extra = shlex.split(args.server_args)

    with Server(ServerSpec(**common, extra_args=(*REFERENCE_ARGS, *extra))) as server:
        expected = reference_answers(server.url, bursts, timeout_s=args.timeout)
    served = ServerSpec(**common, drafter=str(args.drafter), extra_args=(*PRESSURE_ARGS, *extra), env=STEADY_MEMORY)
    with Server(served) as server:
        outcome = run_bursts(server, bursts, expected, timeout_s=args.timeout, progress=_progress("soak", total))
        problems, numbers = _read_out(server, outcome)
        for line in (*outcome.mismatches, *problems):
            print(line, flush=True)
        if outcome.wrong and not (outcome.hangs or outcome.stopped):
            path = args.out / f"soak-{args.seed}.json"
            _write_failure(path, server, bursts, outcome, expected, timeout_s=args.timeout)
    report = {
        "requests": len(outcome.answers),
        "checked": sum(is_checked(*pair) for pair in outcome.answers),
        "mismatches": len(outcome.wrong),
        "ties": len(outcome.mismatches) - len(outcome.wrong),
        "hangs": outcome.hangs,
        "problems": len(problems),
        "aborts": sum(answer.cut for _, answer in outcome.answers),
        **numbers,
        "seed": args.seed,
        "seconds": round(time.monotonic() - began, 1),
        "versions": versions(),
    }
    print(json.dumps(report), flush=True)
    return int(bool(outcome.wrong or problems))


if __name__ == "__main__":
    sys.exit(main())
