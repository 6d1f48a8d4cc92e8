"""relay/kernels compiled for sm_80 and sm_90 without a GPU, by `benchmarks/kernel_resources.py`.

The whole matrix is compiled by that command; docs/kernels.md has its table. Here: the table is complete and within the
GPUs' limits, a part of it is compiled again, and a round launches what that page says.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kernel_resources import (
    MAX_SHARED,
    TARGETS,
    Shape,
    all_shapes,
    binaries,
    launch_round,
    no_launches,
    parse_table,
)

ROOT = Path(__file__).parents[2]
TABLE = parse_table((ROOT / "docs/kernels.md").read_text())
BASE = Shape("bfloat16", hidden_size=2048, block_size=16, batch_size=32, width=4096)


def test_the_table_covers_every_shape_within_the_limits() -> None:
    """Catches constants, shapes or kernels that changed after the table was made; any spill; too much shared memory."""
    launched = set(binaries(all_shapes()))
    for target in TARGETS:
        assert set(TABLE[target]) == launched, "run `python -m benchmarks.kernel_resources`, put its table on the page"
        for binary, used in TABLE[target].items():
            assert used.spilled == 0, (binary, used)
            assert used.shared <= MAX_SHARED[target], (binary, used)
            assert 0 < used.registers <= 255


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_binaries_are_those_of_the_table(target: int) -> None:
    """Compiles every kernel in every dtype, in a process of its own: Triton's choice of a driver is per process."""
    command = [sys.executable, "-m", "benchmarks.kernel_resources", "--quick", "--target", str(target)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    found = parse_table(run.stdout)[target]
    assert {(binary.kernel, binary.dtype) for binary in found} == {
        (binary.kernel, binary.dtype) for binary in TABLE[target]
    }
    assert found == {binary: TABLE[target][binary] for binary in found}


class _Operations(TorchDispatchMode):
    """Notes what torch itself would do on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("changed", "launches"),
    [
        ({}, ["relay_store", "relay_gather", "relay_apply"]),
        ({"is_table": False}, ["relay_store", "relay_tokens", "relay_gather", "relay_apply"]),
        ({"is_table": False, "stale_token": True}, ["relay_store", "relay_tokens", "relay_gather", "relay_apply"]),
    ],
)
def test_a_round_launches_these_kernels_and_nothing_else(changed: dict[str, Any], launches: list[str]) -> None:
    """Catches a copy, a cast or a cuBLAS product that slips in between; `empty` allocates and launches nothing."""
    with no_launches() as noted:
        launch_round(BASE._replace(**changed), during=(operations := _Operations()))
    assert [launch.kernel for launch in noted] == launches
    embedding = {"repeat"} if changed else set()
    assert set(operations.names) <= {"empty", "view", "detach"} | embedding, operations.names
    assert operations.names.count("empty") == len(launches) - 2
