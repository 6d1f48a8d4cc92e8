"""`make bench`: throughput and tau of the demo pair, every arm, on this machine.

usage: python -m benchmarks.demo_pair [--dtype float32] [--concurrency 1,8] [--repeats 3] [--max-new-tokens 64]

Each arm's server is started once, warmed up, and driven with the built-in held-out prompts at each concurrency;
repeats follow each other within an arm, so the spread is that of one server. Output hashes of all arms must agree.
Ends with a table and one JSON line (arms, spread, hashes, versions, git SHA, hardware, argv).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.arms import make_arms
from sglang_dflow.demo import DEMO_DRAFTER
from sglang_dflow.demo_model import ensure_demo_target
from sglang_dflow.prompts import varied_prompts
from sglang_dflow.provenance import git_commit, machine, versions
from sglang_dflow.server import Server
from sglang_dflow.verify import Completion, generate_all, mean_tau

PROMPTS = 24


@dataclass(frozen=True)
class Point:
    """One arm at one concurrency. Throughput in output tokens per second: median, lowest and highest repeat."""

    arm: str
    concurrency: int
    tokens_per_s: float
    lowest: float
    highest: float
    tau: float
    output_hash: str


def _hash(answers: Sequence[Completion]) -> str:
    return hashlib.sha256(json.dumps([answer.output_ids for answer in answers]).encode()).hexdigest()[:12]


def measure(server: Server, arm: str, prompts_ids: list[list[int]], args: argparse.Namespace) -> list[Point]:
    """Return the points of one running arm."""
    generate_all(server.url, prompts_ids[:4], concurrency=4, max_new_tokens=16)  # warm-up
    points = []
    for level in map(int, args.concurrency.split(",")):
        rates = []
        for _ in range(args.repeats):
            began = time.monotonic()
            answers = generate_all(server.url, prompts_ids, concurrency=level, max_new_tokens=args.max_new_tokens)
            rates.append(sum(answer.tokens for answer in answers) / (time.monotonic() - began))
        points.append(
            Point(
                arm=arm,
                concurrency=level,
                tokens_per_s=round(statistics.median(rates), 2),
                lowest=round(min(rates), 2),
                highest=round(max(rates), 2),
                tau=round(mean_tau(answers), 4),
                output_hash=_hash(answers),
            )
        )
        print(f"  {arm}, concurrency {level}: {points[-1].tokens_per_s} tokens/s", flush=True)
    return points


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all arms; exit status 1 if their outputs differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_pair", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args(argv)

    from transformers import AutoTokenizer

    target = ensure_demo_target()
    tokenizer = AutoTokenizer.from_pretrained(target)
    # Eight each of maths, code and conversation.
    prompts_ids = [prompt.token_ids(tokenizer) for prompt in varied_prompts()[:36] if int(prompt.id.split("/")[1]) < 8]
    points: list[Point] = []
    with tempfile.TemporaryDirectory() as scratch:
        for arm, spec in make_arms(target, DEMO_DRAFTER, Path(scratch), dtype=args.dtype).items():
            with Server(spec) as server:
                points += measure(server, arm, prompts_ids[:PROMPTS], args)
    print(f"\n{'arm':<16} {'concurrency':>11} {'tokens/s':>9} {'lowest':>7} {'highest':>7} {'tau':>6}  outputs")
    for p in points:
        print(
            f"{p.arm:<16} {p.concurrency:>11} {p.tokens_per_s:>9.2f} {p.lowest:>7.2f} {p.highest:>7.2f} "
            f"{p.tau:>6.3f}  {p.output_hash}"
        )
    equal = len({p.output_hash for p in points}) == 1
    report = {
        "points": [asdict(point) for point in points],
        "outputs_equal": equal,
        "prompts": PROMPTS,
        "git_commit": git_commit(),
        "machine": machine(),
        "versions": versions(),
        "argv": sys.argv[1:] if argv is None else list(argv),
    }
    print(json.dumps(report), flush=True)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
