"""One hook that empties the relay pool when weights are updated (I4): states of old weights serve no new draft."""

from __future__ import annotations

from typing import Any

from sglang_dflow.compat import HOST_VERSION
from sglang_dflow.hooks.record import HookRecord

_TARGET = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager._select_runners"


def forget_on_weight_update(runners: Any, updater: Any, selector: str = "all") -> None:
    """Ask a DFLOW worker to forget; runs after `_select_runners`, which every weight update calls."""
    worker = updater.draft_worker
    if hasattr(type(worker), "forget_relayed"):
        worker.forget_relayed()


def _install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TARGET.replace(":", "."), forget_on_weight_update, HookType.AFTER)


WEIGHT_UPDATE_HOOKS: tuple[HookRecord, ...] = (
    HookRecord(
        name="forget-on-weight-update",
        target=_TARGET,
        host_version=HOST_VERSION,
        fingerprint="778803c5ed26e88f",
        why="A weight update without a cache flush would leave states of the old weights in the pool for one round.",
        how="AFTER hook on the choice of the runners to update: the worker empties its pool before its next iteration.",
        tried="Overriding `weight_update_runners` of the worker: not asked when only the target is updated.",
        upstream="none yet: wants a worker callback for weight updates",
        remove_when="the host tells the speculative worker of every weight update",
        test="tests/host/test_worker.py::test_flush_and_weight_update_forget",
        install=_install,
    ),
)
