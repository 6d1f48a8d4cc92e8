"""The laboratory's table: every arm with every seed, trained, measured, written to ``table.jsonl``, printed.

    python -m benchmarks.lab.table benchmarks/lab/table.yaml --parallel 2

The table file names a base recipe and the arms; an arm is a set of recipe fields, and may start from another arm's
drafter of the same seed (``start``). Runs are ``sglang-dflow train``, measurements ``sglang-dflow acceptance`` in
process: T = 0 and T = 1, relay off and on where there is one. Finished runs are skipped and interrupted ones go on;
a run directory made with other settings is refused, never mixed. ``table.jsonl`` has one line per arm and seed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from sglang_dflow.training.recipe import Recipe

Record = dict[str, Any]

CONTROL = "dflash"  # the arm that ratios are against, same seed


@dataclass(frozen=True)
class Arm:
    """Recipe fields of one row of the table."""

    fields: dict[str, Any]
    start: str | None = None  # the arm whose last drafter of the same seed this one starts from
    reported: bool = True  # False: only a start for others


@dataclass(frozen=True)
class Table:
    """A table file."""

    recipe: Path
    out: Path
    seeds: list[int]
    prompts: list[str]
    arms: dict[str, Arm]
    limit: int = 40
    max_new_tokens: int = 256
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])

    @classmethod
    def load(cls, path: Path) -> Table:
        """Read a table file.

        Raises:
            ValueError: all arms whose recipe or start does not exist, in one message.
        """
        content = yaml.safe_load(path.read_text())
        content |= {key: Path(content[key]) for key in ("recipe", "out")}
        table = cls(**content | {"arms": {name: Arm(**arm) for name, arm in content["arms"].items()}})
        problems = []
        for name, arm in table.arms.items():
            known = list(table.arms)[: list(table.arms).index(name)]
            if arm.start is not None and arm.start not in known:
                problems.append(f"arm {name!r} starts from {arm.start!r}, expected an arm above it")
                continue
            try:
                Recipe.from_dict(table.recipe_fields(name, 0), f"arm {name!r}")
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError(f"{path}: " + "; ".join(problems))
        return table

    def run_dir(self, arm: str, seed: int) -> Path:
        """Where a run lives."""
        return self.out / f"{arm.replace(' ', '-')}.{seed}"

    def recipe_fields(self, arm: str, seed: int) -> dict[str, Any]:
        """The complete recipe of one run."""
        fields = yaml.safe_load(self.recipe.read_text()) | self.arms[arm].fields
        if (start := self.arms[arm].start) is not None:
            fields["init_from"] = str(self.run_dir(start, seed) / "last")
        return fields | {"seed": seed, "run_dir": str(self.run_dir(arm, seed))}


# --- running -----------------------------------------------------------------------------------------------


def train(table: Table, arm: str, seed: int) -> float:
    """Train one arm, or finish its training; returns its minutes, without evaluations.

    Raises:
        RuntimeError: the run directory was made with other settings, or the trainer failed.
    """
    folder, fields = table.run_dir(arm, seed), table.recipe_fields(arm, seed)
    before = folder / "recipe.yaml"
    if before.exists() and (old := yaml.safe_load(before.read_text())) != fields:
        changed = sorted(key for key in old.keys() | fields.keys() if old.get(key) != fields.get(key))
        raise RuntimeError(f"{folder} was made with other settings ({', '.join(changed)}). Remedy: move it away.")
    folder.mkdir(parents=True, exist_ok=True)
    overrides = [f"--set={key}={json.dumps(value)}" for key, value in fields.items()]
    command = [sys.executable, "-m", "sglang_dflow.training.trainer", str(table.recipe), *overrides]
    with (folder / "train.log").open("a") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise RuntimeError(f"the trainer of {folder} ended with code {code}; see {folder / 'train.log'}.")
    state = torch.load(folder / "checkpoint.pt", weights_only=True, mmap=True, map_location="cpu")
    return float(state["elapsed"]) / 60


def measure(table: Table, arm: str, seed: int, temperature: float) -> Record:
    """The JSON record of ``sglang-dflow acceptance`` for one drafter.

    Raises:
        RuntimeError: the measurement failed.
    """
    from sglang_dflow.training import evaluate

    argv = [
        "--target",
        str(table.recipe_fields(arm, seed)["target"]),
        "--drafter",
        str(table.run_dir(arm, seed) / "last"),
    ]
    argv += ["--prompts", *table.prompts, "--limit", str(table.limit), "--max-new-tokens", str(table.max_new_tokens)]
    argv += ["--temperature", str(temperature), "--cache", str(table.out / "eval")]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = evaluate.main(argv)
    if code:
        raise RuntimeError(f"sglang-dflow acceptance {' '.join(argv)} ended with code {code}.")
    return json.loads(printed.getvalue().strip().split("\n")[-1])


def read_records(path: Path) -> list[Record]:
    """The table so far; the last line of an arm and seed counts."""
    lines = path.read_text().split("\n") if path.exists() else []
    records = {(record["arm"], record["seed"]): record for record in map(json.loads, filter(None, lines))}
    return list(records.values())


def run(table: Table, chosen: Sequence[str], seeds: Sequence[int], parallel: int) -> list[str]:
    """Run what is not in ``table.jsonl`` yet, ``parallel`` runs at a time; returns the failures."""
    lock, results = threading.Lock(), table.out / "table.jsonl"
    table.out.mkdir(parents=True, exist_ok=True)
    done = {(r["arm"], r["seed"]): r["fields"] for r in read_records(results)}
    jobs: dict[tuple[str, int], Future[None]] = {}

    def job(arm: str, seed: int) -> None:
        start = table.arms[arm].start
        if start is not None and (start, seed) in jobs:
            jobs[start, seed].result()  # was submitted earlier, so it runs or is done: no deadlock
        _log(f"table: {arm}, seed {seed}: training into {table.run_dir(arm, seed)}")
        minutes = train(table, arm, seed)
        record: Record = {"arm": arm, "seed": seed, "minutes": round(minutes, 2)}
        with lock:  # one measurement at a time: they share torch's threads, stdout and the answers' cache
            acceptance = {f"{t:g}": measure(table, arm, seed, t) for t in table.temperatures}
            record |= {"fields": table.recipe_fields(arm, seed), "acceptance": acceptance}
            with results.open("a") as out:
                out.write(json.dumps(record) + "\n")
        _log(f"table: {arm}, seed {seed}: {minutes:.1f} min, tau {_taus(record, table.temperatures)}")

    with ThreadPoolExecutor(parallel) as pool:
        for arm in _with_starts(table, chosen):
            for seed in seeds:
                if done.get((arm, seed)) == table.recipe_fields(arm, seed):
                    _log(f"table: {arm}, seed {seed}: done before")
                else:
                    jobs[arm, seed] = pool.submit(job, arm, seed)
    errors = {key: future.exception() for key, future in jobs.items()}
    return [f"{arm}, seed {seed}: {error}" for (arm, seed), error in errors.items() if error is not None]


def _with_starts(table: Table, chosen: Sequence[str]) -> list[str]:
    """The chosen arms and the arms that they start from, in the order of the file."""
    wanted = set(chosen)
    for name in reversed(table.arms):
        start = table.arms[name].start
        if name in wanted and start is not None:
            wanted.add(start)
    return [name for name in table.arms if name in wanted]


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- the printed table ---------------------------------------------------------------------------------------


def tau(record: Record, temperature: str, relay: bool) -> float | None:
    """Mean tau over the sets; None without that measurement."""
    mean = record["acceptance"].get(temperature, {}).get("mean", {})
    return mean.get("relay_on" if relay else "relay_off", {}).get("tau")


def _taus(record: Record, temperatures: Sequence[float]) -> str:
    parts = []
    for temperature in (f"{t:g}" for t in temperatures):
        values = {name: tau(record, temperature, name == "relay") for name in ("masks", "relay")}
        parts += [f"T={temperature} {name} {value:.3f}" for name, value in values.items() if value is not None]
    return ", ".join(parts)


def mean_sd(values: Sequence[float], digits: int) -> str:
    """``mean ± sd`` (sample standard deviation); ``-`` without values."""
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def by_depth(records: Sequence[Record], relay: bool) -> list[float]:
    """Share of rounds that accepted at least 1..B-1 drafts at T = 0, mean over sets and seeds."""
    arm = "relay_on" if relay else "relay_off"
    rows = [one[arm]["by_depth"] for record in records for one in record["acceptance"]["0"]["sets"].values()]
    return [statistics.fmean(column) for column in zip(*rows)]


def markdown(records: Sequence[Record], order: Sequence[str]) -> str:
    """The table: mean ± sd over seeds, and the ratio to the control, paired by seed."""
    temperatures = sorted({temperature for record in records for temperature in record["acceptance"]}, key=float)
    control = {record["seed"]: record for record in records if record["arm"] == CONTROL}
    head = ["arm", "seeds", "minutes"]
    head += [f"{what} T={t}" for t in temperatures for what in ("tau", f"/ {CONTROL}")]
    lines = [head + ["accepted at least 1.. drafts, T=0"]]
    for name in order:
        of_arm = [record for record in records if record["arm"] == name]
        for relay in (False, True):
            measured = [r for r in of_arm if any(tau(r, t, relay) is not None for t in temperatures)]
            if not measured:
                continue
            has_relay = any(tau(r, t, True) is not None for r in of_arm for t in temperatures)
            label = f"{name}, {'relay' if relay else 'masks only'}" if has_relay else name
            row = [label, str(len(measured)), f"{statistics.fmean(r['minutes'] for r in measured):.1f}"]
            for t in temperatures:
                values = {r["seed"]: value for r in measured if (value := tau(r, t, relay)) is not None}
                base = {seed: tau(r, t, False) for seed, r in control.items()}
                ratios = [value / b for seed, value in values.items() if (b := base.get(seed)) is not None]
                row += [mean_sd(list(values.values()), 3), mean_sd(ratios, 3)]
            depth = by_depth(measured, relay) if "0" in temperatures else []
            lines.append([*row, " ".join(f"{share:.2f}"[1:] if share < 1 else "1.0" for share in depth)])
    rule = ["---"] * len(lines[0])
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def main(argv: list[str] | None = None) -> int:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--arms", nargs="+", help="only these, and the arms that they start from")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: the table file's")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time; each takes the recipe's threads")
    parser.add_argument("--print-only", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    table = Table.load(args.table)
    chosen = args.arms or list(table.arms)
    if unknown := [name for name in chosen if name not in table.arms]:
        parser.error(f"no such arms: {', '.join(unknown)}; expected some of {', '.join(table.arms)}")
    torch.set_num_threads(1)
    failures = [] if args.print_only else run(table, chosen, args.seeds or table.seeds, args.parallel)
    reported = [name for name, arm in table.arms.items() if arm.reported]
    print(markdown(read_records(table.out / "table.jsonl"), reported))
    for failure in failures:
        _log(f"table: FAILED {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
