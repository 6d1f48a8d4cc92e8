"""`sglang-dflow bench report`: one self-contained HTML page from a run directory, its figures as PNG, README tables.

Reads results.json (`bench serving`), cost.json (`bench cost`) if it is there, and the JSON of `sglang-dflow
acceptance`. `--readme FILE` rewrites what stands between `<!-- bench:begin -->` and `<!-- bench:end -->` in a Markdown
file; `<!-- bench:begin gains -->` and `<!-- bench:begin cost -->` mark the other tables. Needs matplotlib (extra
`bench`) for the page.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang_dflow.bench import tables
from sglang_dflow.bench.arms import DFLASH, DFLOW
from sglang_dflow.bench.tables import Table

Record = dict[str, Any]

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --page: #fff; --soft: #667; --line: #d8dbe0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6ea; --page: #16181c; --soft: #9aa3b0; --line: #343a44; } }
body { color: var(--ink); background: var(--page); font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem;
       max-width: 70rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: 1.2rem; }
figure { margin: 0; } figure svg { width: 100%; height: auto; } figcaption { color: var(--soft); font-size: .85rem; }
.wide { overflow-x: auto; margin: 1rem 0; } summary { cursor: pointer; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--page); }
code, pre { font-size: .82rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.soft { color: var(--soft); font-size: .9rem; }
.settings td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
"""


# --- Markdown --------------------------------------------------------------------------------------------


def _throughput_block(results: Record, cost: Record | None) -> str:
    own = results["settings"]
    requests = sorted({point["requests"] for point in results["points"]})
    said = " ".join(filter(None, (tables.findings(results)[0], tables.not_run(results))))
    return (
        f"{tables.throughput(results).markdown()}\n\n"
        f"Concurrency in the columns; median (lowest..highest) of {results['points'][0]['repeats']} repeats; "
        f"{' to '.join(map(str, requests[:: max(len(requests) - 1, 1)]))} greedy requests of at most "
        f"{own['max_new_tokens']} tokens; {own['dtype']}; {own['machine']}. {said}\n\n    {results['command']}"
    )


def _gains_block(results: Record, cost: Record | None) -> str:
    return tables.gains(results).markdown()


def _cost_block(results: Record, cost: Record | None) -> str:
    if cost is None:
        raise ValueError(
            "a table of the cost is asked for, but the run directory has no cost.json: sglang-dflow bench cost"
        )
    return f"{tables.cost(cost).markdown()}\n\n    {cost['command']}"


BLOCKS: dict[str, Callable[[Record, Record | None], str]] = {
    "": _throughput_block,
    " gains": _gains_block,
    " cost": _cost_block,
}
"""Name after `bench:begin` -> what belongs there."""

_BLOCK = re.compile(r"(<!-- bench:begin( \w+)? -->\n).*?(<!-- bench:end -->)", re.DOTALL)


def with_tables(text: str, results: Record, cost: Record | None) -> str:
    """Return a Markdown text with its marked blocks rewritten.

    Raises:
        ValueError: it has no marks, or one of an unknown name.
    """

    def block(match: re.Match[str]) -> str:
        name = match[2] or ""
        if name not in BLOCKS:
            raise ValueError(f"<!-- bench:begin{name} --> is not known, expected one of {sorted(BLOCKS)}")
        return f"{match[1]}{BLOCKS[name](results, cost)}\n{match[3]}"

    found, count = _BLOCK.subn(block, text)
    if not count:
        raise ValueError("no <!-- bench:begin --> .. <!-- bench:end --> to write the table between; put these lines in")
    return found


# --- HTML ------------------------------------------------------------------------------------------------


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table.header)
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in table.rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>'


def _folded(title: str, table: Table) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{_table(table)}</details>"


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


def page(results: Record, cost: Record | None, acceptance: Sequence[Record], directory: Path) -> str:
    """Return the page; writes its figures into `directory` as PNG."""
    sections = [
        *_sweep(results, directory),
        *(_acceptance(acceptance, directory) if acceptance else ()),
        *(_cost(cost, directory) if cost else ()),
        *_provenance(results, cost, acceptance),
    ]
    said = "".join(f"<li>{html.escape(one)}</li>" for one in tables.findings(results))
    title = "sglang-dflow: benchmark report"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style></head>\n'
        f"<body><h1>{title}</h1>\n<ul>{said}</ul>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def _sweep(results: Record, directory: Path) -> Iterator[str]:
    from sglang_dflow.bench import figures

    yield "<h2>Concurrency sweep</h2>"
    points = results["points"]
    shown = [
        _figure(
            figures.save(figures.throughput(points), "throughput", directory),
            "Output tokens/s; bars from the lowest to the highest repeat.",
        )
    ]
    pair = [one for one in results["comparisons"] if (one["arm"], one["reference"]) == (DFLOW, DFLASH)]
    if pair:
        caption = "DFLOW over DFLASH: throughput (paired by repeat) and tau (band: 95 % interval over prompts)."
        shown.append(_figure(figures.save(figures.gain(pair), "gain", directory), caption))
    if any(point["by_depth"] for point in points):
        caption = "Acceptance by depth at the lowest concurrency."
        shown.append(_figure(figures.save(figures.depth(points), "depth", directory), caption))
    yield f'<div class="figures">{"".join(shown)}</div>'
    yield _table(tables.throughput(results))
    yield (
        '<p class="soft">Median (lowest..highest) of the repeats. tau: committed tokens per verification, the bonus '
        "included. Realised gain: (throughput ratio - 1) / (tau ratio - 1).</p>"
    )
    yield _table(tables.gains(results))
    yield _folded("Latency, memory and output hash of every point", tables.latency(results))
    yield _folded("Share of rounds that accepted at least 1, 2, .. drafts", tables.depths(results))


def _acceptance(records: Sequence[Record], directory: Path) -> Iterator[str]:
    from sglang_dflow.bench import figures

    yield "<h2>Acceptance per data set</h2>"
    shown = []
    for record in records:
        drawn = figures.save(figures.tau_bars(record), f"tau-T{record['temperature']:g}", directory)
        shown.append(_figure(drawn, f"tau at T = {record['temperature']:g}; bars: 95 % interval over prompts."))
    yield f'<div class="figures">{"".join(shown)}</div>'
    yield _table(tables.acceptance(records))
    yield '<p class="soft">The paper (arXiv 2609.06498): other targets and drafters, on GPUs.</p>'
    yield _table(tables.paper_tau())
    yield _table(tables.paper_throughput())


def _cost(record: Record, directory: Path) -> Iterator[str]:
    from sglang_dflow.bench import figures, paper

    yield "<h2>Cost of a round</h2>"
    drawn = figures.save(figures.cost(record["stacks"]), "cost", directory)
    yield f'<div class="figures">{_figure(drawn, "Mean time of a round by part, from an instrumented server.")}</div>'
    yield _table(tables.cost(record))
    told = paper.COST_MS
    yield (
        f'<p class="soft">The paper: verify {told["verify"]} ms, draft {told["draft"]} ms, relay {told["relay"]} ms a '
        f"round ({told['relay'] / sum(told.values()):.1%}).</p>"
    )


def _provenance(results: Record, cost: Record | None, acceptance: Sequence[Record]) -> Iterator[str]:
    yield "<h2>Provenance</h2>"
    commands = [results["command"], *([cost["command"]] if cost else []), *(one["command"] for one in acceptance)]
    yield f"<pre>{html.escape(chr(10).join(commands))}</pre>"
    own = results["settings"]
    rows = [[name, json.dumps(value) if not isinstance(value, str) else value] for name, value in own.items()]
    rows += [["output hash, " + arm, value] for arm, value in results["outputs"]["hashes"].items()]
    yield f'<div class="settings">{_table(Table(["setting", "value"], rows))}</div>'


# --- the command -----------------------------------------------------------------------------------------


def last_json(path: Path) -> Record:
    """Return the JSON object in the last line of a file (a command's kept output, or a file of one object).

    Raises:
        ValueError: there is none.
    """
    text = path.read_text().strip()
    for candidate in (text, text.rsplit("\n", 1)[-1]):
        try:
            found = json.loads(candidate)
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict):
            return found
    raise ValueError(f"{path}: expected one JSON object, alone or as the last line")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-dflow bench report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="run directory, with results.json and perhaps cost.json")
    parser.add_argument("--acceptance", type=Path, nargs="+", default=[], metavar="FILE", help="acceptance's output")
    parser.add_argument("--out", type=Path, help="the page (default: RUN/report.html); PNG and JSON files go beside it")
    parser.add_argument(
        "--readme", type=Path, nargs="+", default=[], metavar="FILE",
        help="Markdown files to update; without --out nothing else is written",
    )  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and the tables."""
    args = _parser().parse_args(argv)
    try:
        return _run(args)
    except ImportError as error:
        print(f"sglang-dflow bench report: {error}; pip install 'sglang-dflow[bench]'", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"sglang-dflow bench report: {error}", file=sys.stderr)
    return 1


def _run(args: argparse.Namespace) -> int:
    results = last_json(args.run / "results.json")
    cost = last_json(args.run / "cost.json") if (args.run / "cost.json").exists() else None
    for file in args.readme:
        file.write_text(with_tables(file.read_text(), results, cost))
        print(f"updated {file}")
    if args.readme and args.out is None:
        return 0
    out = args.out or args.run / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in ("results.json", "cost.json"):  # what the page was made from
        if (args.run / name).exists() and out.parent.resolve() != args.run.resolve():
            shutil.copyfile(args.run / name, out.parent / name)
    text = page(results, cost, [last_json(file) for file in args.acceptance], out.parent)
    out.write_text(text)
    print(f"wrote {out} ({len(text) / 1e3:.0f} kB) and its figures as PNG beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
