"""The report's figures: small, one message each, for a page that may be dark and narrow.

A figure is drawn once and saved twice: as SVG text for the page, whose text and lines take the page's colour, and as
PNG on white. Needs matplotlib (extra `bench`).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sglang_dflow.bench.arms import BASELINE, DFLASH, DFLOW, DOMINO, EAGLE3, RELAY_OFF
from sglang_dflow.bench.cost import ALL_PARTS

Record = dict[str, Any]

INK = "#010203"  # stands for the page's text colour: no other element has it
COLOURS = {
    BASELINE: "#8a8a8a", DFLASH: "#e08e0b", RELAY_OFF: "#2fa8a0",
    DFLOW: "#3d86e0", DOMINO: "#a869d6", EAGLE3: "#d9537f",
}  # fmt: skip
MARKERS = {BASELINE: "s", DFLASH: "o", RELAY_OFF: "v", DFLOW: "D", DOMINO: "^", EAGLE3: "X"}
PART_COLOURS = ("#3d86e0", "#2fa8a0", "#d9537f", "#e08e0b", "#a869d6", "#6bbf59", "#8a8a8a", "#b9b9b9")

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "figure.figsize": (4.4, 3.1),
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    **{name: INK for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")},
    "grid.color": INK,
}


@contextmanager
def _drawing() -> Iterator[tuple[Figure, Axes]]:
    """A new figure, in this module's style while the context is open."""
    matplotlib.use("Agg")
    with matplotlib.rc_context(STYLE):
        yield plt.subplots(layout="constrained")


def save(figure: Figure, name: str, directory: Path) -> str:
    """Write `directory/name.png`; return the SVG element."""
    figure.savefig(directory / f"{name}.png", dpi=130, facecolor="white")
    sink = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):  # ids that no other figure of the page has
        figure.savefig(sink, format="svg", metadata={"Date": None})
    plt.close(figure)
    svg = sink.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")


def _concurrency_axis(axes: Axes, levels: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels, [str(level) for level in levels])
    axes.minorticks_off()
    axes.set_xlabel("concurrency")


def _legend(figure: Figure, axes: Axes) -> None:
    """Above the axes, where no line can run through it."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper center", ncols=min(len(labels), 4), columnspacing=1, handlelength=1.4
    )


def _error(spreads: Sequence[dict[str, float]]) -> list[list[float]]:
    """Distances from the median to the lowest and highest, as matplotlib wants them."""
    return [[one["median"] - one["lowest"] for one in spreads], [one["highest"] - one["median"] for one in spreads]]


def throughput(points: Sequence[Record]) -> Figure:
    """Output tokens/s of every arm by concurrency."""
    with _drawing() as (figure, axes):
        for arm in dict.fromkeys(point["arm"] for point in points):
            own = [point for point in points if point["arm"] == arm]
            rates = [point["tokens_per_s"] for point in own]
            axes.errorbar(
                [point["concurrency"] for point in own], [rate["median"] for rate in rates], _error(rates),
                label=arm, color=COLOURS[arm], marker=MARKERS[arm], markersize=4, linewidth=1.4, capsize=3,
            )  # fmt: skip
        _concurrency_axis(axes, sorted({point["concurrency"] for point in points}))
        axes.set_ylabel("output tokens/s")
        axes.set_ylim(bottom=0)
        _legend(figure, axes)
    return figure


def gain(comparisons: Sequence[Record]) -> Figure:
    """Throughput of DFLOW over DFLASH by concurrency, beside the ratio of their taus."""
    with _drawing() as (figure, axes):
        levels = [one["concurrency"] for one in comparisons]
        ratios = [one["throughput_ratio"] for one in comparisons]
        axes.errorbar(
            levels, [one["median"] for one in ratios], _error(ratios),
            label="throughput", color=COLOURS[DFLOW], marker="D", markersize=4, linewidth=1.4, capsize=3,
        )  # fmt: skip
        axes.plot(levels, [one["tau_ratio"] for one in comparisons], color=COLOURS[DFLASH], label="tau")
        ends = [one["tau_ratio_interval"] for one in comparisons]
        axes.fill_between(
            levels, [low for low, _ in ends], [high for _, high in ends], color=COLOURS[DFLASH], alpha=0.25
        )
        axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
        _concurrency_axis(axes, levels)
        axes.set_ylabel("DFLOW / DFLASH")
        _legend(figure, axes)
    return figure


def depth(points: Sequence[Record]) -> Figure:
    """Share of rounds that accepted at least t drafts, at the lowest concurrency."""
    with _drawing() as (figure, axes):
        lowest = min(point["concurrency"] for point in points)
        for point in points:
            if point["concurrency"] == lowest and point["by_depth"]:
                axes.plot(
                    range(1, len(point["by_depth"]) + 1), point["by_depth"],
                    label=point["arm"], color=COLOURS[point["arm"]], marker=MARKERS[point["arm"]], markersize=4,
                )  # fmt: skip
        axes.set(xlabel="drafts accepted, at least", ylabel="share of rounds")
        axes.set_ylim(bottom=0)
        _legend(figure, axes)
    return figure


def tau_bars(acceptance: Record) -> Figure:
    """tau per prompt set, masks only and with the relay, with 95 % intervals."""
    with _drawing() as (figure, axes):
        sets = {**acceptance["sets"], "mean": acceptance["mean"]}
        arms = {"relay_off": ("masks only", COLOURS[RELAY_OFF]), "relay_on": ("relay", COLOURS[DFLOW])}
        shown = [arm for arm in arms if arm in acceptance["mean"]]
        for number, arm in enumerate(shown):
            label, colour = arms[arm]
            taus = [one[arm]["tau"] for one in sets.values()]
            ends = [one[arm]["interval"] for one in sets.values()]
            error = [[t - low for t, (low, _) in zip(taus, ends)], [high - t for t, (_, high) in zip(taus, ends)]]
            places = [i + (number - (len(shown) - 1) / 2) * 0.38 for i in range(len(sets))]
            axes.bar(places, taus, 0.36, yerr=error, label=label, color=colour, ecolor=INK, capsize=2)
        axes.set_xticks(range(len(sets)), list(sets), rotation=35, ha="right")
        axes.set_ylabel(f"tau, T = {acceptance['temperature']:g}")
        axes.grid(axis="x", visible=False)
        _legend(figure, axes)
    return figure


def cost(stacks: Sequence[Record]) -> Figure:
    """Mean time of a round by part; the round with the relay off is 1 at every concurrency."""
    with _drawing() as (figure, axes):
        stacks = sorted(stacks, key=lambda one: one["concurrency"])
        whole = {one["concurrency"]: one["round_ms"]["mean"] for one in stacks if one["arm"] == RELAY_OFF}
        labels = [f"{'off' if one['arm'] == RELAY_OFF else 'on'}\n{one['concurrency']}" for one in stacks]
        bottom = [0.0] * len(stacks)
        for part, colour in zip(ALL_PARTS, PART_COLOURS, strict=True):
            heights = [one["parts_ms"][part] / whole[one["concurrency"]] for one in stacks]
            axes.bar(labels, heights, 0.6, bottom=bottom, label=part, color=colour)
            bottom = [low + height for low, height in zip(bottom, heights)]
        axes.set_ylabel("time of a round, relay off = 1")
        axes.set_xlabel("relay, concurrency")
        axes.grid(axis="x", visible=False)
        _legend(figure, axes)
    return figure
