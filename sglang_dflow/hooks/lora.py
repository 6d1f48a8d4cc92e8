"""One hook that lets DFLOW serve LoRA adapters on the target where the host lets DFLASH serve them.

Adapters apply to the target alone; the drafter runs unadapted, and sees an adapter through the captured states. What
the host's LoRA relies on, the same number of tokens of every request in a verify, holds for DFLOW as for DFLASH.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dflow.compat import HOST_VERSION
from sglang_dflow.hooks.record import HookRecord

_TARGET = "sglang.srt.arg_groups.lora_hook:check_lora_speculative_compatibility"


class _NamedDflash:
    """Server arguments with DFLASH as the algorithm, as the original check reads them: the last declaration wins."""

    def __init__(self, server_args: Any) -> None:
        self._server_args = server_args
        declared = getattr(server_args, "_resolved_overrides", None) or ()
        self._resolved_overrides = [*declared, ("sglang_dflow", {"speculative_algorithm": "DFLASH"})]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server_args, name)


def check_as_dflash(original: Callable[[Any], None], server_args: Any) -> None:
    """Ask the host's check about DFLOW as about DFLASH; raises what it raises."""
    from sglang.srt.arg_groups.overrides import resolving_view

    if resolving_view(server_args).speculative_algorithm == "DFLOW":
        server_args = _NamedDflash(server_args)
    original(server_args)


def _install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TARGET.replace(":", "."), check_as_dflash, HookType.AROUND)


LORA_HOOKS: tuple[HookRecord, ...] = (
    HookRecord(
        name="lora-as-dflash",
        target=_TARGET,
        host_version=HOST_VERSION,
        fingerprint="7dd959b96894e739",
        why="The host refuses LoRA with every algorithm that it does not know by name.",
        how="AROUND hook: hands the check a view of the server arguments in which the algorithm is DFLASH; all that it "
        "refuses for DFLASH it refuses for DFLOW.",
        tried="No seam: the check compares the name, CustomSpecAlgo is not asked.",
        upstream="none yet: wants `supports_lora()` of the algorithm",
        remove_when="the check asks the algorithm instead of its name",
        test="tests/e2e/test_lora.py",
        install=_install,
    ),
)
