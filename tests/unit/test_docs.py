"""Every test that the documentation or a hook record names exists: a cell of the matrix is backed, not asserted."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "patches" / "LEDGER.md"])
_NAMED = re.compile(r"`(?:tests/)?((?:unit|host|e2e|gpu)/test_\w+\.py|test_\w+\.py)(?:::(test_\w+))?")


def _file(name: str) -> Path | None:
    found = [ROOT / "tests" / name] if "/" in name else [*(ROOT / "tests").rglob(name)]
    return found[0] if len(found) == 1 and found[0].exists() else None


def _tests_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def problems_of(text: str) -> list[str]:
    """The named tests that do not exist."""
    problems = []
    for name, test in _NAMED.findall(text):
        path = _file(name)
        if path is None:
            problems.append(name)
        elif test and test not in _tests_of(path):
            problems.append(f"{name}::{test}")
    return problems


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_tests_exist(document: Path) -> None:
    assert problems_of(document.read_text()) == []


def test_a_missing_test_is_noticed() -> None:
    """And at least the matrix names some."""
    text = "`tests/unit/test_pool.py::test_gone`, `test_nowhere.py`, `tests/unit/test_pool.py`, `e2e/test_gone.py`"
    assert problems_of(text) == ["unit/test_pool.py::test_gone", "test_nowhere.py", "e2e/test_gone.py"]
    assert len(_NAMED.findall((ROOT / "docs" / "serving.md").read_text())) > 3
