"""Renders every hook record into `patches/LEDGER.md`. `make ledger` writes the file; a test compares it."""

from __future__ import annotations

from pathlib import Path

from sglang_dflow.compat import HOST_VERSION
from sglang_dflow.cpu.hooks import CPU_HOOKS
from sglang_dflow.hooks import HOOKS
from sglang_dflow.hooks.record import HookRecord

LEDGER = Path(__file__).parents[2] / "patches" / "LEDGER.md"

_HEAD = f"""# Ledger of run-time hooks

Generated from the hook records by `make ledger`; a test compares it. Host: sglang {HOST_VERSION}. Source patches: none.

Every entry is a debt: a place of the host that no seam and no subclass reaches. A record is installed only while the
fingerprint of its target's source matches.
"""


def _entry(record: HookRecord) -> str:
    rows = (
        ("target", f"`{record.target}`"),
        ("fingerprint", f"`{record.fingerprint}` at {record.host_version}"),
        ("why", record.why),
        ("how", record.how),
        ("tried first", record.tried),
        ("upstream", record.upstream),
        ("remove when", record.remove_when),
        ("test", f"`{record.test}`"),
    )
    return "\n".join([f"### {record.name}", "", *(f"- **{name}**: {text}" for name, text in rows)])


def render() -> str:
    """Return the ledger's text."""
    parts = [_HEAD]
    for title, records in (("Wherever DFLOW is registered", HOOKS), ("On the CPU platform only", CPU_HOOKS)):
        parts.append(f"## {title}\n")
        parts += [_entry(record) + "\n" for record in records]
    return "\n".join(parts)


if __name__ == "__main__":
    LEDGER.parent.mkdir(exist_ok=True)
    LEDGER.write_text(render())
    print(f"wrote {LEDGER}")
