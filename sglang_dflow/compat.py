"""The only module that knows which host versions the product serves on.

Relies on the host's distribution metadata, not on `sglang.__version__`, so that it can answer before anything of
the host is imported. Every other module may assume the pinned host.
"""

from __future__ import annotations

from importlib import metadata

HOST_VERSION = "0.5.23"


def installed_host_version() -> str:
    """Return the version of the installed `sglang` distribution, or `"not installed"`."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "not installed"


def host_problem(version: str | None = None) -> str | None:
    """Return what is wrong with the host's version, with the remedy, or None if it is the pinned one."""
    found = installed_host_version() if version is None else version
    if found == HOST_VERSION:
        return None
    return (
        f"sglang is {found}, but this sglang-dflow was written and tested for exactly {HOST_VERSION}. "
        f"Install it (pip install 'sglang=={HOST_VERSION}') or an sglang-dflow release for sglang {found}."
    )
