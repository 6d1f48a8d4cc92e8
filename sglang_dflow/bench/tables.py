"""The report's tables as rows of text, for HTML and Markdown alike. Numbers are formatted here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang_dflow.bench import paper
from sglang_dflow.bench.arms import DFLASH, DFLOW
from sglang_dflow.bench.cost import ALL_PARTS

Record = dict[str, Any]


class Table(NamedTuple):
    """Column names and rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def spread(one: dict[str, float], digits: int) -> str:
    """Median (lowest..highest)."""
    return f"{one['median']:.{digits}f} ({one['lowest']:.{digits}f}..{one['highest']:.{digits}f})"


def optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def throughput(results: Record) -> Table:
    """Output tokens/s by concurrency, one row an arm, and tau at the lowest."""
    levels = results["settings"]["concurrency"]
    rows = []
    for arm in results["arms"]:
        own = {point["concurrency"]: point for point in results["points"] if point["arm"] == arm["arm"]}
        if own:
            cells = [spread(own[level]["tokens_per_s"], 1) for level in levels]
            rows.append([arm["arm"], *cells, optional(own[levels[0]]["tau"], ".3f")])
        else:
            rows.append([arm["arm"], *["-"] * len(levels), "not run"])
    return Table(["output tokens/s", *(str(level) for level in levels), "tau"], rows)


def latency(results: Record) -> Table:
    """Latency, acceptance, memory and output hash of every point."""
    header = ["arm", "concurrency", "requests", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "TPOT p99 ms", "tau",
              "relay hits", "peak RAM MB", "peak GPU MB", "outputs"]  # fmt: skip
    rows = []
    for p in results["points"]:
        times = [spread(p[kind][percentile], 1) for kind in ("ttft_ms", "tpot_ms") for percentile in ("p50", "p99")]
        gpu = "-" if p["peak_gpu_mb"] is None else spread(p["peak_gpu_mb"], 0)
        rows.append(
            [p["arm"], str(p["concurrency"]), str(p["requests"]), *times, optional(p["tau"], ".3f"),
             optional(p["relay_hit_rate"], ".2f"), spread(p["peak_ram_mb"], 0), gpu, p["output_hash"]]
        )  # fmt: skip
    return Table(header, rows)


def gains(results: Record) -> Table:
    """Arms against each other."""
    header = [
        "arm / reference",
        "concurrency",
        "throughput",
        "tau (95 % interval)",
        "throughput / tau",
        "realised gain",
    ]
    rows = []
    for one in results["comparisons"]:
        cells = [f"{one['arm']} / {one['reference']}", str(one["concurrency"]), spread(one["throughput_ratio"], 3)]
        if "tau_ratio" in one:
            low, high = one["tau_ratio_interval"]
            realised = one["realised_gain"]
            cells += [
                f"{one['tau_ratio']:.3f} ({low:.3f}..{high:.3f})",
                spread(one["throughput_over_tau"], 3),
                "undefined: the tau ratio's interval holds 1" if realised is None else spread(realised, 2),
            ]
        rows.append([*cells, *["-"] * (len(header) - len(cells))])
    return Table(header, rows)


def depths(results: Record) -> Table:
    """Share of rounds that accepted at least t drafts."""
    points = [point for point in results["points"] if point["by_depth"]]
    width = max((len(point["by_depth"]) for point in points), default=0)
    rows = [[p["arm"], str(p["concurrency"]), *(f"{share:.3f}" for share in p["by_depth"])] for p in points]
    return Table(["arm", "concurrency", *(str(t) for t in range(1, width + 1))], rows)


def cost(record: Record) -> Table:
    """Mean milliseconds of a round by part."""
    rows = []
    for one in record["stacks"]:
        share = one["relay_share"]
        rows.append(
            [one["arm"], str(one["concurrency"]), str(one["rounds"]), f"{one['round_ms']['mean']:.2f}",
             *(f"{one['parts_ms'][part]:.3f}" for part in ALL_PARTS),
             f"{share['median']:.2%} ({share['p10']:.2%}..{share['p90']:.2%})"]
        )  # fmt: skip
    parts = (f"{part} ms" for part in ALL_PARTS)
    return Table(["arm", "concurrency", "rounds", "round ms", *parts, "relay share, median (p10..p90)"], rows)


def acceptance(records: Sequence[Record]) -> Table:
    """tau per prompt set, ours."""
    rows = []
    for record in records:
        for name, one in {**record["sets"], "mean": record["mean"]}.items():
            cells = []
            for arm in ("relay_off", "relay_on"):
                of_arm = one.get(arm)
                cells.append("-" if of_arm is None else _interval(of_arm["tau"], of_arm["interval"]))
            ratio = _interval(one["ratio"], one["ratio_interval"]) if "ratio" in one else "-"
            prompts = next(
                (str(of_arm["n"]) for of_arm in one.values() if isinstance(of_arm, dict) and "n" in of_arm), ""
            )
            rows.append([name, f"{record['temperature']:g}", prompts, *cells, ratio])
    return Table(
        ["set", "T", "prompts", "tau, masks only (95 %)", "tau, relay (95 %)", "relay / masks (95 %, paired)"], rows
    )


def _interval(value: float, ends: Sequence[float]) -> str:
    return f"{value:.3f} ({ends[0]:.3f}..{ends[1]:.3f})"


def paper_tau() -> Table:
    """The paper's mean tau over the same six sets."""
    rows = [
        [target, str(t), f"{eagle:.2f}", f"{dflash:.2f}", f"{dflow:.2f}", f"{dflow / dflash:.3f}"]
        for target, t, eagle, dflash, dflow in paper.TAU
    ]
    return Table(["paper: target", "T", "EAGLE-3", "DFlash", "DFlow", "DFlow / DFlash"], rows)


def paper_throughput() -> Table:
    """The paper's tokens/s on GSM8K."""
    rows = [[name, *map(str, values)] for name, values in paper.THROUGHPUT.items()]
    return Table(["paper: tokens/s, GSM8K", *map(str, paper.CONCURRENCY)], rows)


def findings(results: Record) -> list[str]:
    """What the sweep says, in sentences; every one follows from the numbers."""
    outputs = results["outputs"]
    said = [
        "Greedy answers of all arms are equal, at every concurrency and in every repeat."
        if outputs["equal"]
        else f"Greedy answers differ: {outputs['mismatches']} mismatches, {outputs['ties']} numerical ties."
    ]
    against = {name: [c for c in results["comparisons"] if (c["arm"], c["reference"]) == (DFLOW, name)]
               for name in (DFLASH, "no speculation")}  # fmt: skip
    if against[DFLASH]:
        below = [c["concurrency"] for c in against[DFLASH] if c["throughput_over_tau"]["median"] < 0.95]
        said.append(
            "DFLOW keeps at least 0.95 of the tau ratio as throughput over DFLASH at every concurrency, by medians."
            if not below
            else f"DFLOW keeps less than 0.95 of the tau ratio as throughput over DFLASH at concurrency {_list(below)}."
        )
    if against["no speculation"]:
        slower = [c["concurrency"] for c in against["no speculation"] if c["throughput_ratio"]["median"] <= 1]
        said.append(
            f"DFLOW is not faster than no speculation at concurrency {_list(slower)}."
            if slower
            else "DFLOW is faster than no speculation at every concurrency, by medians."
        )
    missing = not_run(results)
    return [*said, missing] if missing else said


def not_run(results: Record) -> str:
    """The arms that could not run, each with its reason; empty if all ran."""
    reasons = [f"{arm['arm']} ({arm['reason']})" for arm in results["arms"] if not arm["runs"]]
    return f"Not run: {'; '.join(reasons)}." if reasons else ""


def _list(levels: Sequence[int]) -> str:
    return ", ".join(map(str, levels))
