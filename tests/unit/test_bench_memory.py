"""Peak memory of a process tree."""

from __future__ import annotations

import subprocess
import sys
import time

from sglang_dflow.bench.memory import PeakMemory

_HOLDER = """
import sys
held = bytearray(b"x") * 150_000_000
print("held", flush=True)
sys.stdin.readline()
del held
print("freed", flush=True)
sys.stdin.readline()
"""
_LAUNCHER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_HOLDER!r}])"


def test_peak_of_a_child_that_freed_its_memory() -> None:
    """The scheduler is a child of the launched process, and its peak is over before the load ends."""
    command = [sys.executable, "-c", _LAUNCHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        with PeakMemory(process.pid) as memory:
            for word in ("held", "freed"):
                assert process.stdout.readline().strip() == word
                time.sleep(1.1)  # two looks
                process.stdin.write("\n")
                process.stdin.flush()
    assert 150 < memory.ram_mb < 300
