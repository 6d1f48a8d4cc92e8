"""Who may import whom: checked in fresh interpreters, since this process has everything loaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_dflow

ROOT = Path(sglang_dflow.__file__).parent
IDEA = [*sorted((ROOT / "relay").rglob("*.py")), ROOT / "config.py"]


def _modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("module", ["sglang_dflow", "sglang_dflow.cli", "sglang_dflow.compat"])
def test_light_modules_import_neither_torch_nor_sglang(module: str) -> None:
    """The host loads the package in each of its processes, and the console script should answer at once."""
    assert _modules_after(f"import {module}") & {"torch", "sglang"} == set()


def test_the_idea_runs_without_the_host() -> None:
    loaded = _modules_after("import sglang_dflow.relay.pool, sglang_dflow.relay.modulation, sglang_dflow.config")
    assert "torch" in loaded
    assert "sglang" not in loaded


@pytest.mark.parametrize("path", IDEA, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_idea_never_names_the_host(path: Path) -> None:
    """Also inside functions, where an import would go unnoticed until it runs."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not any(name == "sglang" or name.startswith("sglang.") for name in names)
