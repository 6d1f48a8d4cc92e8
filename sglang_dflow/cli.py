"""The console script `sglang-dflow`: one subcommand per job, each imported only when it is asked for."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from sglang_dflow import __version__

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("sglang_dflow.demo", "serve the demo pair and show what the relay changes"),
    "verify": ("sglang_dflow.verify", "compare DFLOW with no speculation, token by token"),
    "soak": ("sglang_dflow.soak.command", "many different requests to one live server, greedy ones checked"),
    "demo-model": ("sglang_dflow.demo_model", "fetch and convert the demo target (SmolLM2-135M-Instruct)"),
    "inspect": ("sglang_dflow.inspect_checkpoint", "what a drafter checkpoint is, and whether it will serve"),
    "convert": ("sglang_dflow.training.convert", "DFlash checkpoint <-> DFlow checkpoint"),
    "prepare-data": ("sglang_dflow.training.data", "prompts -> the target's own answers"),
    "acceptance": ("sglang_dflow.training.evaluate", "tau of a drafter per prompt set, relay on and off"),
    "bench": ("sglang_dflow.bench.command", "concurrency sweep, cost of a round, one report"),
    "rescore": ("sglang_dflow.training.rescore", "fit a rescorer to a drafter: it takes the target's stale tokens"),
    "train": ("sglang_dflow.training.trainer", "train a drafter from a recipe"),
}
"""Subcommand -> (module with `main(argv) -> int | None`, one line of help)."""


def _usage() -> str:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    return (
        f"sglang-dflow {__version__}: DFlow speculative decoding for SGLang\n\n"
        f"usage: sglang-dflow COMMAND [ARGUMENTS]   (COMMAND --help tells its arguments)\n\n{listed}\n\n"
        "Serve with: python -m sglang.launch_server --speculative-algorithm DFLOW "
        "--speculative-draft-model-path DRAFTER ..."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(__version__)
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        print(f"unknown command {command!r}, expected one of: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, exit_on_signal)
    module = importlib.import_module(COMMANDS[command][0])
    return int(module.main(rest) or 0)


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Leave through the open context managers: a started server is stopped, not orphaned."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
