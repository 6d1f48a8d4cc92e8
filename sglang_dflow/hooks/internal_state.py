"""Two hooks that carry the relay through the scheduler's internal-state endpoints.

`GET /server_info` shows the relay's counters; `POST /set_internal_state {"server_args": {"dflow_relay": 0}}`
switches relaying at run time (the endpoint carries numbers only: 0 or 1). The host builds both tables in methods of
one class and offers no registration.
"""

from __future__ import annotations

from typing import Any

from sglang_dflow.compat import HOST_VERSION
from sglang_dflow.hooks.record import HookRecord

_CONTROLLER = "sglang.srt.managers.scheduler_components.internal_state:SchedulerInternalStateController"
RELAY_KEY = "dflow_relay"


def _worker(controller: Any) -> Any | None:
    """The scheduler's DFLOW worker, or None while another algorithm serves."""
    worker = controller.scheduler.draft_worker
    return worker if hasattr(type(worker), "relay_state") else None


def _add_relay_state(result: Any, controller: Any, state: dict[str, Any]) -> None:
    worker = _worker(controller)
    if worker is not None:
        state["dflow"] = worker.relay_state()


def _add_relay_handler(handlers: dict[str, Any], controller: Any) -> dict[str, Any] | None:
    worker = _worker(controller)
    if worker is None:
        return None
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected, _UpdateHandler

    def validate(key: str, value: Any) -> None:
        if value not in (0, 1):
            raise UpdateRejected(f"{key} is {value!r}, expected 0 or 1.")
        if not worker.has_relay_pool:
            raise UpdateRejected(f"{key} cannot be changed: the relay was switched off at start.")

    def apply(key: str, value: float) -> dict[str, Any]:
        worker.set_relay_enabled(bool(value))
        return {}

    return {**handlers, RELAY_KEY: _UpdateHandler(validate, apply)}


def _after(method: str, hook: Any) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_CONTROLLER.replace(':', '.')}.{method}", hook, HookType.AFTER)


INTERNAL_STATE_HOOKS: tuple[HookRecord, ...] = (
    HookRecord(
        name="server-info",
        target=f"{_CONTROLLER}._add_speculative",
        host_version=HOST_VERSION,
        fingerprint="4e3ebbce3bfaecf0",
        why="The relay's counters would not be visible to an operator: `/server_info` has no field for a plugin.",
        how="AFTER hook: adds the key `dflow` to the state when the draft worker is ours.",
        tried="The worker has `dump_info_records`, but the host asks for it only when `is_dspark()`.",
        upstream="none yet: wants `BaseSpecWorker.internal_state()`",
        remove_when="the host asks every speculative worker for its internal state",
        test="tests/e2e/test_server.py::test_server_info_shows_the_relay",
        install=lambda: _after("_add_speculative", _add_relay_state),
    ),
    HookRecord(
        name="relay-switch",
        target=f"{_CONTROLLER}._update_handlers",
        host_version=HOST_VERSION,
        fingerprint="4c829223260efeb0",
        why="Operators (and the demo) switch relaying without restarting a server.",
        how=f"AFTER hook: adds a handler for `{RELAY_KEY}` to the table of updatable settings.",
        tried="An environment variable alone (SGLANG_DFLOW_RELAY): it needs a restart for each comparison.",
        upstream="none yet: wants worker-provided update handlers",
        remove_when="the host lets a speculative worker register update handlers",
        test="tests/e2e/test_server.py::test_relay_switch_changes_drafts_not_output",
        install=lambda: _after("_update_handlers", _add_relay_handler),
    ),
)
