"""`sglang-dflow bench`: `serving` (concurrency sweep), `cost` (time of a round), `report` (one page from both)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "serving": ("sglang_dflow.bench.serving", "throughput, latency and acceptance of every arm, by concurrency"),
    "cost": ("sglang_dflow.bench.cost", "where the time of a round goes, from an instrumented server"),
    "report": ("sglang_dflow.bench.report", "one HTML page, PNG files and README tables from a run directory"),
}
"""Subcommand -> (module with `main(argv) -> int`, one line of help)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in COMMANDS:
        module = importlib.import_module(COMMANDS[arguments[0]][0])
        return int(module.main(arguments[1:]))
    listed = "\n".join(f"  {name:<8} {text}" for name, (_, text) in COMMANDS.items())
    asked_for_help = bool(arguments) and arguments[0] in ("-h", "--help")
    print(
        f"usage: sglang-dflow bench COMMAND [ARGUMENTS]\n\n{listed}", file=sys.stdout if asked_for_help else sys.stderr
    )
    return 0 if asked_for_help else 2
