"""A real SGLang server as a context manager: start, wait for health with progress, talk, stop.

Used by `sglang-dflow demo`, `sglang-dflow verify`, the benchmarks and the end-to-end tests, so that all of them
launch the product as a user does: `python -m sglang.launch_server ...` in a process group of its own, its log in a
file. On a machine without CUDA the server is started on the CPU platform of this package.
"""

from __future__ import annotations

import operator
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import requests

CPU_PLATFORM = "dflow_cpu"
# `Server.stop` ends all processes at once. The launcher takes that for a crash, and with either of these on (the
# default) sleeps five seconds before it looks for schedulers to dump.
_NO_CRASH_DUMPS = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
# Runs a command that is sent SIGTERM when its parent ends without a word (prctl PR_SET_PDEATHSIG survives the exec).
_TIED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
_FAILURE_LINES = 25

Log = Callable[[str], None]


def has_cuda() -> bool:
    """Return whether a CUDA device is usable here. Imports torch."""
    import torch

    return torch.cuda.is_available()


def reserve_port() -> socket.socket:
    """Return a socket that keeps a TCP port of the loopback interface from everybody but a server that is told of it.

    A server binds its port half a minute after it was chosen, and until then a port that is only free goes to any
    connection or other server. The socket was bound alone, so nobody else has the port; it shares from now on, so a
    listener (they set SO_REUSEADDR) may bind beside it. Close it when the port is not needed any more.
    """
    keeper = socket.socket()
    keeper.bind(("127.0.0.1", 0))
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return keeper


@dataclass(frozen=True)
class ServerSpec:
    """How to launch one server.

    Attributes:
        model: target, a directory or a hub id.
        drafter: DFlow or DFlash drafter; None serves without speculation.
        algorithm: `--speculative-algorithm`, used when there is a drafter.
        dtype: `--dtype`; `float32` for bit-stable comparisons.
        extra_args: further `sglang.launch_server` arguments.
        env: additional environment variables.
    """

    model: str
    drafter: str | None = None
    algorithm: str = "DFLOW"
    dtype: str = "auto"
    extra_args: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)

    def argv(self, port: int) -> list[str]:
        """Return the launch command.

        On CUDA, float32 needs an attention backend that computes in it: flashinfer and fa3 take 16-bit types only.
        """
        argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", self.model]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--dtype", self.dtype]
        if self.drafter is not None:
            argv += ["--speculative-algorithm", self.algorithm, "--speculative-draft-model-path", self.drafter]
        if not has_cuda():
            argv += ["--device", "cpu"]
        elif self.dtype == "float32" and "--attention-backend" not in self.extra_args:
            argv += ["--attention-backend", "triton"]
        return [*argv, *self.extra_args]

    def environ(self) -> dict[str, str]:
        """Return the child's environment."""
        environ = {**_NO_CRASH_DUMPS, **os.environ, **self.env}
        if not has_cuda():
            environ.setdefault("SGLANG_PLATFORM", CPU_PLATFORM)
        return environ


class Server:
    """One running server. Use as a context manager; leaving it stops the whole process group.

    A server ends with the thread that entered it, even if that is killed: enter it in a thread that lives long enough.
    """

    def __init__(
        self,
        spec: ServerSpec,
        *,
        log: Log = print,
        log_path: Path | None = None,
        start_timeout_s: float = 600.0,
    ) -> None:
        self.spec = spec
        self._port_keeper = reserve_port()
        self.port = int(self._port_keeper.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._start_timeout_s = start_timeout_s
        if log_path is None:
            handle, name = tempfile.mkstemp(prefix="sglang-dflow-", suffix=".log")
            os.close(handle)
            log_path = Path(name)
        self.log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        argv = self.spec.argv(self.port)
        self._log(f"$ {shlex.join(argv)}")
        with self.log_path.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-c", _TIED, *argv],
                env=self.spec.environ(),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def log_text(self) -> str:
        """Return what the server has logged so far."""
        return self.log_path.read_text(errors="replace")

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        began = time.monotonic()
        next_line_s = 2.0
        while True:
            code = self._process.poll()
            if code is not None:
                raise RuntimeError(self._failure(f"the server stopped while starting, exit code {code}"))
            if self._is_healthy():
                self._log(f"  server ready after {time.monotonic() - began:.0f} s (log: {self.log_path})")
                return
            waited_s = time.monotonic() - began
            if waited_s > self._start_timeout_s:
                raise RuntimeError(self._failure(f"the server is not healthy after {self._start_timeout_s:.0f} s"))
            if waited_s > next_line_s:
                next_line_s += 10.0
                self._log(f"  waiting for the server, {waited_s:.0f} s")
            time.sleep(0.25)

    def _is_healthy(self) -> bool:
        try:
            return requests.get(f"{self.url}/health", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    def _failure(self, what: str) -> str:
        tail = "\n".join(self.log_text().splitlines()[-_FAILURE_LINES:])
        return f"{what}. The end of its log ({self.log_path}):\n{tail}"

    def stop(self, grace_s: float = 10.0) -> None:
        """Stop the server and everything it started. Does nothing if it is stopped already."""
        self._port_keeper.close()
        process = self._process
        if process is None:
            return
        for sign, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, grace_s)):
            try:
                os.killpg(process.pid, sign)
            except ProcessLookupError:
                break
            if _wait_for_group(process, wait_s):
                break
        process.wait()
        self._process = None  # only now: an interrupted stop can be tried again

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 600.0) -> Any:
        """POST JSON and return the JSON answer. Raises RuntimeError with the server's words on a failure."""
        return post(self.url, path, body, timeout_s=timeout_s)

    def server_info(self) -> dict[str, Any]:
        """Return `/server_info`."""
        return server_info(self.url)


def _wait_for_group(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait until no process of the group is left; the leader is reaped on the way."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        process.poll()
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def post(url: str, path: str, body: dict[str, Any], *, timeout_s: float = 600.0) -> Any:
    """POST JSON to a server and return the JSON answer.

    Raises:
        RuntimeError: the server answered with an error; carries its status and text.
    """
    answer = requests.post(f"{url}{path}", json=body, timeout=timeout_s)
    if answer.status_code != 200:
        raise RuntimeError(f"{url}{path} answered {answer.status_code}: {answer.text[:500]}")
    return answer.json()


def server_info(url: str) -> dict[str, Any]:
    """Return `/server_info` of a server."""
    answer = requests.get(f"{url}/server_info", timeout=60)
    answer.raise_for_status()
    return dict(answer.json())


def relay_states(url: str) -> list[dict[str, Any]]:
    """Return the relay's counters and switch of every data-parallel rank (`internal_states[rank].dflow`).

    Raises:
        RuntimeError: the server does not run DFLOW.
    """
    states = [dict(state["dflow"]) for state in server_info(url).get("internal_states") or [] if "dflow" in state]
    if not states:
        raise RuntimeError(f"{url} does not run DFLOW: /server_info has no dflow state")
    return states


def relay_state(url: str) -> dict[str, Any]:
    """Return the relay's counters and switch of a DFLOW server, all data-parallel ranks together.

    Raises:
        RuntimeError: the server does not run DFLOW.
    """
    return together(relay_states(url))


def together(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts of all ranks added, tau and acceptance weighted by their rounds; the rest is the first rank's."""
    total = dict(states[0])
    if len(states) == 1 or "rounds" not in total:  # without a pool there is nothing to count
        return total
    for name in ("rounds", "relayed_rows", "eligible_rows", "pool_bytes"):
        total[name] = sum(state[name] for state in states)
    total["dropped_rows"] = {
        reason: sum(state["dropped_rows"][reason] for state in states) for reason in total["dropped_rows"]
    }
    shares = [state["rounds"] / max(1, total["rounds"]) for state in states]
    total["tau"] = sum(share * state["tau"] for share, state in zip(shares, states))
    by_position = zip(*(state["acceptance_by_position"] for state in states))
    total["acceptance_by_position"] = [sum(map(operator.mul, shares, column)) for column in by_position]
    total["relay_hit_rate"] = total["relayed_rows"] / max(1, total["eligible_rows"])
    return total


def set_relay(url: str, enabled: bool) -> None:
    """Switch relaying of a running DFLOW server.

    Raises:
        RuntimeError: the server refused.
    """
    answer = post(url, "/set_internal_state", {"server_args": {"dflow_relay": int(enabled)}})
    if not all(answer):  # one bool per data-parallel rank
        raise RuntimeError(f"{url} refused to switch the relay {'on' if enabled else 'off'}: {answer}")
