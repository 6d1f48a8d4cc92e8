"""A server's process: ends with whoever started it. The server itself: `tests/e2e`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_STARTER = """
import sys
from sglang_dflow.server import Server, ServerSpec

class Sleeper(ServerSpec):
    argv = lambda self, port: [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
    environ = lambda self: {}

server = Server(Sleeper("none"), log=lambda text: None)
print(server.log_path, flush=True)
server.__enter__()
"""


def test_a_server_does_not_outlive_a_killed_starter() -> None:
    """Catches servers that go on for ever after a worker of the tests, or a benchmark, was killed."""
    with subprocess.Popen([sys.executable, "-c", _STARTER], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        log = Path(starter.stdout.readline().strip())
        pid = _wait_for(lambda: log.read_text().strip())
        assert Path(f"/proc/{pid}").exists()
        starter.kill()
    assert _wait_for(lambda: _is_gone(int(pid)))
    log.unlink()


def _is_gone(pid: int) -> bool:
    """Ended, though perhaps not reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _wait_for(look: Callable[[], T]) -> T:
    end = time.monotonic() + 30
    while not (found := look()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found
