"""hooks/record.py: a hook is installed only on the host code that it was written for."""

from __future__ import annotations

import dataclasses

import pytest

from sglang_dflow.hooks.record import HookRecord, fingerprint, install_all, resolve

TARGET = "sglang_dflow.relay.alignment:RelayRule.of"


def _record(installed: list[str], **changes: str) -> HookRecord:
    record = HookRecord(
        name="x",
        target=TARGET,
        host_version="0",
        fingerprint=fingerprint(TARGET),
        why="",
        how="",
        tried="",
        upstream="",
        remove_when="",
        test="",
        install=lambda: installed.append("x"),
    )
    return dataclasses.replace(record, **changes)


def test_fingerprints_tell_sources_apart() -> None:
    others = ("sglang_dflow.relay.alignment:relay_rows", "sglang_dflow.relay.alignment:RelayRule.first_row")
    assert len({fingerprint(target) for target in (TARGET, *others)}) == 3
    assert fingerprint(TARGET) == fingerprint(TARGET)
    assert isinstance(resolve("sglang_dflow.relay.alignment:RelayRule"), type)


def test_matching_records_are_installed() -> None:
    installed: list[str] = []
    install_all((_record(installed), _record(installed)))
    assert installed == ["x", "x"]


def test_one_changed_target_installs_nothing() -> None:
    """Half of the hooks on another host would be worse than none."""
    installed: list[str] = []
    with pytest.raises(RuntimeError, match=r"moved: .*RelayRule.of is [0-9a-f]{16}, expected 0{16}.*pip install"):
        install_all((_record(installed), _record(installed, name="moved", fingerprint="0" * 16)))
    assert installed == []
