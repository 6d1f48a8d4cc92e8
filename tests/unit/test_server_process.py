"""A server's process and port: it ends with whoever started it. The server itself: `tests/e2e`."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from sglang_dflow.server import reserve_port

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


def test_a_reserved_port_is_for_the_server_only() -> None:
    """Catches a port that another worker's server or connection takes before our server binds it (a CI run failed)."""
    with reserve_port() as keeper, socket.socket() as stranger, socket.socket() as listener:
        address = keeper.getsockname()
        with pytest.raises(OSError, match="Address already in use"):
            stranger.bind(address)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        socket.create_connection(address, timeout=5).close()


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
