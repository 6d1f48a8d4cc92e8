"""Gain of the relay against the drafter's own tau.

    python -m benchmarks.lab.plot runs/lab/table/table.jsonl --out docs/img/gain.svg

Every point is one drafter (arm and seed) on one prompt set: across, its tau from masks alone; up, its tau with the
relay divided by that. Points with a dark edge are means over the sets. Needs matplotlib (extra ``bench``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.lab.table import Record, read_records


class Point(NamedTuple):
    """One drafter on one set."""

    arm: str
    seed: int
    set: str  # "mean": over the sets
    own_tau: float  # masks only
    gain: float  # relay on / masks only


def points(records: Sequence[Record], temperature: str = "0") -> list[Point]:
    """All drafters with a relay."""
    found = []
    for record in records:
        acceptance = record["acceptance"].get(temperature, {})
        for name, one in {**acceptance.get("sets", {}), "mean": acceptance.get("mean", {})}.items():
            if "relay_on" in one:
                own = one["relay_off"]["tau"]
                found.append(Point(record["arm"], record["seed"], name, own, one["relay_on"]["tau"] / own))
    return found


def draw(found: Sequence[Point], out: Path, temperature: str) -> None:
    """Write the figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 4.5))
    for number, arm in enumerate(dict.fromkeys(point.arm for point in found)):
        sets = [p for p in found if p.arm == arm and p.set != "mean"]
        means = [p for p in found if p.arm == arm and p.set == "mean"]
        colour = f"C{number}"
        axes.scatter([p.own_tau for p in sets], [p.gain for p in sets], s=12, alpha=0.5, color=colour)
        across, up = [p.own_tau for p in means], [p.gain for p in means]
        axes.scatter(across, up, s=40, color=colour, edgecolor="black", label=arm)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel(f"tau of the drafter, masks only (T = {temperature})")
    axes.set_ylabel("tau with the relay / masks only")
    axes.legend(fontsize="small")
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def main(argv: list[str] | None = None) -> int:
    """Print the points as JSON lines and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+", help="table.jsonl files")
    parser.add_argument("--out", type=Path, default=Path("runs/lab/gain.svg"))
    parser.add_argument("--temperature", default="0")
    args = parser.parse_args(argv)
    found = [point for path in args.tables for point in points(read_records(path), args.temperature)]
    for point in found:
        print(json.dumps(point._asdict()))
    if not found:
        print("plot: no drafter with a relay is measured in these tables yet; nothing to draw")
        return 1
    try:
        draw(found, args.out, args.temperature)
    except ModuleNotFoundError as error:
        print(f"plot: {error.name} is not installed, no figure. Remedy: pip install 'sglang-dflow[bench]'")
        return 0
    print(f"plot: {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
