"""One hook on weight updates: old states serve no new draft (I4), and a target's files stay out of the drafter.

A relay pool is emptied by every update. `/update_weights_from_disk` and `.._from_ipc` have no selector: their weights
are the target's, and the host would load what is named alike (`layers.0..`) into a DFLASH-family drafter, too.
"""

from __future__ import annotations

from typing import Any

from sglang_dflow.compat import HOST_VERSION
from sglang_dflow.hooks.record import HookRecord

_TARGET = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager._select_runners"


def on_weight_update(runners: list[tuple[str, Any]], updater: Any, *selector: str) -> list[tuple[str, Any]] | None:
    """Ask a DFLOW worker to forget; runs after `_select_runners`, which every weight update calls.

    Returns:
        The runners to update, without the drafter where the caller could not choose; None leaves the host's choice.
    """
    worker = updater.draft_worker
    if not hasattr(type(worker), "forget_relayed"):
        return None
    worker.forget_relayed()
    return None if selector else [(role, runner) for role, runner in runners if role != "draft"]


def _install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TARGET.replace(":", "."), on_weight_update, HookType.AFTER)


WEIGHT_UPDATE_HOOKS: tuple[HookRecord, ...] = (
    HookRecord(
        name="forget-on-weight-update",
        target=_TARGET,
        host_version=HOST_VERSION,
        fingerprint="778803c5ed26e88f",
        why="A weight update without a cache flush would leave states of the old weights in the pool for one round; "
        "one from disk would load the target's layers into the drafter and ruin its drafts without a word.",
        how="AFTER hook on the choice of the runners to update: the worker empties its pool before its next iteration; "
        "callers without a selector (disk, ipc) update the target only.",
        tried="Overriding `weight_update_runners` of the worker: not asked when only the target is updated.",
        upstream="none yet: wants a worker callback for weight updates",
        remove_when="the host tells the speculative worker of every weight update",
        test="tests/host/test_worker.py::test_flush_and_weight_update_forget, "
        "tests/host/test_worker.py::test_target_files_stay_out_of_the_drafter",
        install=_install,
    ),
)
