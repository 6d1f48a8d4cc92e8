"""The real pair that the tests serve, SmolLM2-135M-Instruct and the drafter of this package; the cores they share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from sglang_dflow.cli import exit_on_signal
from sglang_dflow.demo import DEMO_DRAFTER
from sglang_dflow.demo_model import ensure_demo_target

if (workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
    # Before torch is imported; servers and whatever else the tests start inherit it. Two threads beside another busy
    # process are slower than one (measured: sglang_dflow/cpu/__init__.py).
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))

SLOW_FILES = (
    "test_lives", "test_sampling", "test_exactness", "test_demo", "test_dflash", "test_server", "test_features",
    "test_bench", "test_tensor_parallel", "test_lora", "test_disaggregation", "test_train", "test_parity",
    "test_kernels",
)  # fmt: skip
"""Files that take more than half a minute, longest first: they begin, so that no worker ends long after another."""


@pytest.fixture(scope="session")
def target() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory."""
    return ensure_demo_target()


@pytest.fixture(scope="session")
def drafter() -> Path:
    """The DFlow drafter that ships in the package."""
    return DEMO_DRAFTER


def pytest_configure() -> None:
    """A test run that is terminated must stop its servers."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, exit_on_signal)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow files; the others keep their order behind them."""
    rank = {name: position for position, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
