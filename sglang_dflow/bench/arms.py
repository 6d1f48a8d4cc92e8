"""The arms that every benchmark compares: same target, dtype, overlap, memory and attention settings in all.

An arm that cannot run here is listed with its reason, never left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sglang_dflow.server import ServerSpec, has_cuda
from sglang_dflow.serving.settings import RelaySettings
from sglang_dflow.training.convert import strip_relay

BASELINE, DFLASH, RELAY_OFF, DFLOW = "no speculation", "DFLASH", "DFLOW relay off", "DFLOW"
DOMINO, EAGLE3 = "DFLOW over Domino", "EAGLE-3"

ALIASES = {
    "baseline": BASELINE, "dflash": DFLASH, "relay-off": RELAY_OFF, "dflow": DFLOW, "domino": DOMINO, "eagle3": EAGLE3,
}  # fmt: skip
"""Word on the command line -> name of the arm, in the order of the tables."""


class Models(NamedTuple):
    """What the arms serve: directories or hub ids.

    Attributes:
        target: the model.
        drafter: DFlow drafter.
        dflash: DFlash drafter; None: the DFlow drafter without its relay.
        domino: DFlow drafter over a Domino head.
        eagle3: EAGLE-3 head.
    """

    target: str
    drafter: str
    dflash: str | None = None
    domino: str | None = None
    eagle3: str | None = None


@dataclass(frozen=True)
class Arm:
    """One arm: how to launch its server, or why it cannot run here. Exactly one of the two is None."""

    name: str
    spec: ServerSpec | None
    reason: str | None = None


def make_arms(
    wanted: Sequence[str], models: Models, scratch: Path, *, dtype: str, extra_args: Sequence[str] = ()
) -> list[Arm]:
    """Return the arms named by `wanted` (words of `ALIASES`).

    `scratch` takes a copy of the DFlow drafter without its relay, for the host's DFLASH, unless `models` has one.
    """
    return [_arm(ALIASES[word], models, scratch, dtype, tuple(extra_args)) for word in wanted]


def _arm(name: str, models: Models, scratch: Path, dtype: str, extra_args: tuple[str, ...]) -> Arm:
    def speculating(drafter: str | None, algorithm: str = "DFLOW", env: dict[str, str] | None = None) -> Arm:
        spec = ServerSpec(
            models.target, drafter, algorithm=algorithm, dtype=dtype, extra_args=extra_args, env=env or {}
        )
        return Arm(name, spec)

    if name == BASELINE:
        return speculating(None)
    if name == DFLASH:
        return speculating(models.dflash or str(_without_relay(models.drafter, scratch)), "DFLASH")
    if name == RELAY_OFF:
        return speculating(models.drafter, env={RelaySettings.VARIABLE: "off"})
    if name == DFLOW:
        return speculating(models.drafter)
    if name == DOMINO:
        return speculating(models.domino) if models.domino else Arm(name, None, "no drafter given (--domino)")
    if models.eagle3 is None:
        return Arm(name, None, "no head given (--eagle3)")
    if not has_cuda():
        return Arm(name, None, "the CPU platform serves the DFlash family only, not EAGLE-3")
    return speculating(models.eagle3, "EAGLE3")


def _without_relay(drafter: str, scratch: Path) -> Path:
    plain = scratch / "dflash-drafter"
    if not plain.exists():
        strip_relay(drafter, plain)
    return plain
