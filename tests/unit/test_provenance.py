"""provenance.py: the commit of this code, and none for a copy in somebody else's checkout."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from sglang_dflow import provenance


def _git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    run = subprocess.run(
        ["git", "-C", str(directory), *identity, *arguments], capture_output=True, text=True, check=True
    )
    return run.stdout.strip()


def test_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a number that is filed under a commit that its code does not belong to, or that hides local changes."""
    module = tmp_path / "provenance.py"
    monkeypatch.setattr(provenance, "__file__", str(module))
    assert provenance.git_commit() is None
    module.write_text("1")
    _git(tmp_path, "init", "-q")
    (tmp_path / "other").write_text("2")
    _git(tmp_path, "add", "other")
    _git(tmp_path, "commit", "-q", "-m", "other")
    assert provenance.git_commit() is None  # untracked: installed into somebody else's checkout
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-q", "-m", "ours")
    assert provenance.git_commit() == _git(tmp_path, "rev-parse", "HEAD")
    module.write_text("3")
    assert provenance.git_commit() == _git(tmp_path, "rev-parse", "HEAD") + "-dirty"


def test_machine_and_versions() -> None:
    assert re.match(r"\d+ x .+, ", provenance.machine())
    assert set(provenance.versions()) == {"sglang-dflow", "sglang", "torch", "transformers"}
