"""One run-time hook as data: what it changes in the host, and when it can go.

Owns the record type and the fingerprint rule. Every hook of the product is a `HookRecord` in a tuple next to
the code that needs it; `sglang_dflow.hooks.ledger` renders all of them into `patches/LEDGER.md`, and a test
compares the file. A record whose target's source has changed is refused at install time: a hook written
against other code is worse than none. Imports neither torch nor sglang.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HookRecord:
    """A debt: one place where the plugin changes the host at run time.

    Attributes:
        name: short identifier, unique over all records.
        target: host symbol, `"package.module:Qual.name"`.
        host_version: exact host version that `fingerprint` was taken from.
        fingerprint: `fingerprint(target)` at that version.
        why: what fails without it.
        how: what the hook does.
        tried: the gentler means tried first (seam, subclass), and why they were not enough.
        upstream: link to the upstream change, or why there is none.
        remove_when: condition under which the record is deleted.
        test: test that fails without the hook.
        install: applies it; called once per process, after the fingerprint matched.
    """

    name: str
    target: str
    host_version: str
    fingerprint: str
    why: str
    how: str
    tried: str
    upstream: str
    remove_when: str
    test: str
    install: Callable[[], None]


def resolve(target: str) -> Any:
    """Return the object that `"package.module:Qual.name"` names."""
    module_name, _, qualname = target.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in filter(None, qualname.split(".")):
        found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
    return found


def fingerprint(target: str) -> str:
    """Return the first 16 hex digits of the SHA-256 of the target's source text."""
    found = resolve(target)
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    if isinstance(found, property):
        found = found.fget
    return hashlib.sha256(inspect.getsource(inspect.unwrap(found)).encode()).hexdigest()[:16]


def install_all(records: tuple[HookRecord, ...]) -> None:
    """Check every record's fingerprint, then install them in order.

    Raises:
        RuntimeError: some targets changed; nothing has been installed then.
    """
    moved = [
        f"{record.name}: {record.target} is {found}, expected {record.fingerprint}"
        for record in records
        if (found := fingerprint(record.target)) != record.fingerprint
    ]
    if moved:
        raise RuntimeError(
            "sglang-dflow: the installed SGLang differs from the one its hooks were written for. "
            + "; ".join(moved)
            + ". Install the pinned host (pip install 'sglang==0.5.23') or an sglang-dflow release for yours."
        )
    for record in records:
        record.install()
