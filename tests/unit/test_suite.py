"""The order in which `make test` hands files to its workers."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import SLOW_FILES


def test_slow_files_exist() -> None:
    """A file that was renamed would begin last, and one worker would wait for the other."""
    found = {path.stem for path in Path(__file__).parents[1].rglob("test_*.py")}
    assert set(SLOW_FILES) - found == set()
