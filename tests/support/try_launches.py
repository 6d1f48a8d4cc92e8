"""Resolve launch commands as `sglang.launch_server` does, without serving; one JSON line per command.

usage: python -m tests.support.try_launches < commands.json   (a list of {"argv": [..], "env": {..}})

Runs the same calls as the host's launcher up to the point where it would fork: plugins, argument parsing,
resolution, checks. One process for many commands, since importing the host takes most of the time of a launch.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    for command in json.load(sys.stdin):
        saved = dict(os.environ)
        os.environ.update(command.get("env", {}))
        try:
            server_args = prepare_server_args(command["argv"])
            server_args.resolve_once()
            server_args.check_server_args()
            outcome = {"error": None, "message": ""}
        except Exception as error:  # the test asks which
            outcome = {"error": type(error).__name__, "message": str(error)}
        finally:
            os.environ.clear()
            os.environ.update(saved)
        print("LAUNCH " + json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
