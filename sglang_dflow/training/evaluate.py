"""``sglang-dflow acceptance``: tau of a drafter per prompt set, with and without relay, in process or served.

Owns the command: arguments, the table and the JSON line. In process, the target answers each prompt once (answers.py)
and the drafter is replayed over the answers (replay.py); ``--server`` asks a running server instead (served.py).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from sglang_dflow.arguments import positive_int
from sglang_dflow.checkpoint_files import locate
from sglang_dflow.prompts import Prompt
from sglang_dflow.provenance import git_commit, versions
from sglang_dflow.training.acceptance import Acceptance, ArmSummary, Interval, RatioSummary, Summary, summarise
from sglang_dflow.training.answers import fingerprint, target_answers
from sglang_dflow.training.dataset import Sample
from sglang_dflow.training.drafter import Drafter
from sglang_dflow.training.prompt_sets import PUBLIC_SETS, load_prompts
from sglang_dflow.training.replay import replay
from sglang_dflow.training.served import ServedDrafter
from sglang_dflow.training.target import Target


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Arms(Protocol):
    """Something that measures a set of prompts with the relay on or off."""

    has_relay: bool

    def measure(self, name: str, prompts: Sequence[Prompt], relay: bool) -> Acceptance:
        """Speculate over the answers to the prompts of one set."""
        ...

    def describe(self) -> dict[str, Any]:
        """What was measured, for the JSON line."""
        ...

    def session(self) -> AbstractContextManager[None]:
        """A context around all measurements."""
        ...


class InProcess:
    """A drafter directory, replayed over the target's answers."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        self.args = args
        torch.set_default_device(args.device)  # of everything that is created from here on
        self.drafter = Drafter.load(locate(args.drafter))
        self.has_relay = self.drafter.relay is not None
        path = locate(args.target)
        self.target = Target.load(path, getattr(torch, args.dtype), self.drafter.config.target_layer_ids)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.cache = args.cache / f"{fingerprint(path)}-{args.dtype}"
        self.samples: dict[str, list[Sample]] = {}

    def measure(self, name: str, prompts: Sequence[Prompt], relay: bool) -> Acceptance:
        """Replay over the set's answers, which are made at the first call."""
        args = self.args
        if name not in self.samples:
            kind = "greedy" if args.temperature == 0 else f"T{args.temperature:g}-seed{args.seed}"
            self.samples[name] = target_answers(
                self.target,
                [(prompt.id, prompt.token_ids(self.tokenizer)) for prompt in prompts],
                self.cache / f"{name}-{kind}-{args.max_new_tokens}.jsonl",
                temperature=args.temperature,
                seed=args.seed,
                max_new_tokens=args.max_new_tokens,
                log=_log,
            )
        return replay(self.drafter, self.target, self.samples[name], relay, args.batch_size)

    def describe(self) -> dict[str, Any]:
        """Paths and type."""
        return {
            "mode": "in process",
            "target": self.args.target,
            "drafter": self.args.drafter,
            "dtype": self.args.dtype,
        }

    def session(self) -> AbstractContextManager[None]:
        """Nothing to restore."""
        return nullcontext()


class OverServer:
    """The drafter of a running server."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        self.args = args
        self.served = ServedDrafter(args.server)
        self.has_relay = self.served.has_relay
        self.tokenizer = AutoTokenizer.from_pretrained(args.target or self.served.info["tokenizer_path"])

    def measure(self, name: str, prompts: Sequence[Prompt], relay: bool) -> Acceptance:
        """Send the prompts to the server."""
        arm, last = f"{name} {_arm(relay)}", time.monotonic()

        def progress(done: int) -> None:
            nonlocal last
            if time.monotonic() - last > 5 or done == len(prompts):
                last = time.monotonic()
                _log(f"acceptance: {arm}, {done}/{len(prompts)} answers")

        return self.served.measure(
            [(prompt.id, prompt.token_ids(self.tokenizer)) for prompt in prompts],
            relay=relay,
            temperature=self.args.temperature,
            max_new_tokens=self.args.max_new_tokens,
            concurrency=self.args.concurrency,
            progress=progress,
        )

    def describe(self) -> dict[str, Any]:
        """What the server says of itself."""
        info = self.served.info
        return {
            "mode": "server",
            "server": self.args.server,
            "target": info.get("model_path"),
            "drafter": info.get("speculative_draft_model_path"),
            "algorithm": self.served.algorithm,
            "dtype": info.get("dtype"),
            "concurrency": self.args.concurrency,
        }

    def session(self) -> AbstractContextManager[None]:
        """The relay's switch is left as it was."""
        return self.served.relay_restored()


# --- output ----------------------------------------------------------------------------------------------


def _arm(relay: bool) -> str:
    return "relay_on" if relay else "relay_off"


HEADER = (
    f"{'set':<12} {'relay':<5} {'T':>4} {'tau':>6} {'95 % interval':>15} {'n':>5} {'rounds':>7} {'hits':>5}  "
    "share of rounds that accepted at least 1..B-1 drafts"
)


def _row(name: str, arm: str, temperature: float, summary: ArmSummary, measured: Sequence[Acceptance]) -> str:
    n = sum(len(one.outcomes) for one in measured)
    rows = sum(one.mask_rows for one in measured)
    hits = f"{sum(one.relayed_rows for one in measured) / rows:.2f}" if rows and arm == "relay_on" else "-"
    depths = [one.by_depth for one in measured]
    known = [depth for depth in depths if depth is not None]
    mean = [sum(column) / len(known) for column in zip(*known)] if len(known) == len(depths) else []
    return (
        f"{name:<12} {arm.removeprefix('relay_'):<5} {temperature:>4g} {summary.tau:>6.3f} "
        f"{_span(summary.interval):>15} {n:>5} {sum(one.rounds for one in measured):>7} {hits:>5}  "
        f"{' '.join(f'{share:.2f}' for share in mean) or 'not told'}"
    )


def _span(interval: Interval) -> str:
    return f"{interval.low:.3f}..{interval.high:.3f}"


def _ratio_line(name: str, ratio: RatioSummary) -> str:
    return f"{name:<12} relay on / off: {ratio.ratio:.4f}, 95 % interval {_span(ratio.interval)} (paired)"


def _record(summary: Summary, measured: dict[str, Acceptance] | None) -> dict[str, Any]:
    """JSON of one set (or, without measurements, of the mean)."""
    record: dict[str, Any] = {}
    for arm, of_arm in summary.arms.items():
        record[arm] = {"tau": round(of_arm.tau, 4), "interval": [round(end, 4) for end in of_arm.interval]}
        if measured is not None:
            one = measured[arm]
            record[arm] |= {
                "n": len(one.outcomes),
                "rounds": one.rounds,
                "tokens": sum(outcome.tokens for outcome in one.outcomes if outcome.rounds),
                "hit_rate": round(one.hit_rate, 4),
                "by_depth": None if one.by_depth is None else [round(share, 4) for share in one.by_depth],
            }
    if summary.ratio is not None:
        record["ratio"] = round(summary.ratio.ratio, 4)
        record["ratio_interval"] = [round(end, 4) for end in summary.ratio.interval]
    return record


# --- the command -----------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-dflow acceptance", description=main.__doc__)
    parser.add_argument("--target", help="directory or hub id; with --server: where the tokenizer is, if not there")
    parser.add_argument("--drafter", help="directory or hub id, measured in process")
    parser.add_argument("--server", metavar="URL", help="a running server with speculation, instead of --drafter")
    parser.add_argument(
        "--prompts", nargs="+", required=True, metavar="SET",
        help=f'files of JSON lines {{"id", "turns"}}, or names: {", ".join(PUBLIC_SETS)}',
    )  # fmt: skip
    parser.add_argument("--limit", type=positive_int, default=40, help="prompts per set (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=positive_int, default=256, help="per answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default); no top-k, no top-p")
    parser.add_argument("--relay", choices=["on", "off", "both"], default="both", help="arms (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of sampled answers and of the bootstrap")
    parser.add_argument("--concurrency", type=positive_int, default=8, help="requests at a time, with --server")
    parser.add_argument("--batch-size", type=positive_int, default=32, help="conversations in lockstep, in process")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="in process")
    parser.add_argument("--cache", type=Path, default=Path("runs/eval"), help="where the target's answers are kept")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="in process")
    parser.add_argument("--threads", type=int, default=0, help="torch threads, in process (default: torch's choice)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """tau per prompt set (committed tokens per verification, bonus included), with 95 % bootstrap intervals over
    prompts: a table, then one JSON line."""
    parser = _parser()
    args = parser.parse_args(argv)
    if (args.server is None) == (args.drafter is None) or (args.drafter is not None and args.target is None):
        parser.error("give either --target and --drafter, or --server")
    if args.temperature < 0:
        parser.error(f"--temperature is {args.temperature}, expected 0 or more")
    if args.threads:
        torch.set_num_threads(args.threads)
    command = shlex.join(["sglang-dflow", "acceptance", *(sys.argv[1:] if argv is None else argv)])
    try:
        return _run(args, command)
    except (ValueError, RuntimeError, OSError) as error:  # OSError: files, and the server's connection
        _log(f"sglang-dflow acceptance: {error}")
        return 1


def _run(args: argparse.Namespace, command: str) -> int:
    sets = dict(load_prompts(source, args.limit) for source in args.prompts)
    if len(sets) < len(args.prompts):
        raise ValueError(f"--prompts names {len(args.prompts)} sets, but their names repeat: {sorted(sets)}.")
    arms: Arms = InProcess(args) if args.server is None else OverServer(args)
    relays = {"on": [True], "off": [False], "both": [False, True]}[args.relay]
    if not arms.has_relay:
        if args.relay == "on":
            raise ValueError("--relay on, but this drafter has no relay; expected a DFlow drafter: convert it first.")
        relays = [False]
    measured: dict[str, dict[str, Acceptance]] = {}
    with arms.session():
        for name, prompts in sets.items():
            for relay in relays:
                began = time.monotonic()
                measured.setdefault(name, {})[_arm(relay)] = one = arms.measure(name, prompts, relay)
                seconds = time.monotonic() - began
                _log(f"acceptance: {name} {_arm(relay)} tau {one.tau:.3f}, {one.rounds} rounds, {seconds:.0f} s")
    by_set, mean = summarise(measured, args.seed)
    print(HEADER)
    for name, summary in by_set.items():
        for arm, of_arm in summary.arms.items():
            print(_row(name, arm, args.temperature, of_arm, [measured[name][arm]]))
    for arm, of_arm in mean.arms.items():
        print(_row("mean", arm, args.temperature, of_arm, [of_set[arm] for of_set in measured.values()]))
    for name, summary in [*by_set.items(), ("mean", mean)]:
        if summary.ratio is not None:
            print(_ratio_line(name, summary.ratio))
    record = {
        **arms.describe(),
        "temperature": args.temperature,
        "sets": {name: _record(summary, measured[name]) for name, summary in by_set.items()},
        "mean": _record(mean, None),
        "limit": args.limit,
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
        "versions": versions(),
        "git_commit": git_commit(),
        "command": command,
    }
    print(json.dumps(record), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
