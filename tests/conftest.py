"""The real pair that the tests serve: SmolLM2-135M-Instruct and the drafter of this package."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from sglang_dflow.cli import exit_on_signal
from sglang_dflow.demo import DEMO_DRAFTER
from sglang_dflow.demo_model import ensure_demo_target


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
