"""What a number was made with: versions, commit, machine. Every JSON record of this package takes it from here."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = ("sglang-dflow", "sglang", "torch", "transformers")


def versions() -> dict[str, str]:
    """Installed versions of this package and of what its numbers depend on."""
    return {name: metadata.version(name) for name in PACKAGES}


def git_commit() -> str | None:
    """The commit that this code belongs to, ``-dirty`` with uncommitted changes; None outside a checkout of it."""
    here = Path(__file__)
    if not _git(here.parent, "ls-files", here.name):  # an installed copy inside somebody else's checkout
        return None
    return _git(here.parent, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty") or None


def machine() -> str:
    """Processors and GPU, in words."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    processors = f"{len(names)} x {names[0]}" if names else f"{os.cpu_count()} x {platform.machine()}"
    import torch

    gpu = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "no GPU"
    return f"{processors}, {gpu}"


def _git(directory: Path, *arguments: str) -> str:
    try:
        run = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git on this machine
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""
