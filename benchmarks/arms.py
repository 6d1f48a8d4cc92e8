"""The arms that every benchmark compares: same target, dtype, overlap and memory settings in all."""

from __future__ import annotations

from pathlib import Path

from sglang_dflow.server import ServerSpec
from sglang_dflow.serving.settings import RelaySettings
from sglang_dflow.training.convert import strip_relay


def make_arms(target: Path, drafter: Path, scratch: Path, *, dtype: str) -> dict[str, ServerSpec]:
    """Return the arms by name. `scratch` takes a copy of the drafter without its relay, for the host's DFLASH."""
    plain = scratch / "dflash-drafter"
    if not plain.exists():
        strip_relay(drafter, plain)
    common = {"model": str(target), "dtype": dtype}
    return {
        "no speculation": ServerSpec(**common),
        "DFLASH": ServerSpec(**common, drafter=str(plain), algorithm="DFLASH"),
        "DFLOW relay off": ServerSpec(**common, drafter=str(drafter), env={RelaySettings.VARIABLE: "off"}),
        "DFLOW": ServerSpec(**common, drafter=str(drafter)),
    }
