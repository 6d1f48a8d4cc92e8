"""One hook that lets DFLOW refuse a request which the host would verify inexactly (serving/request_checks.py)."""

from __future__ import annotations

from typing import Any

from sglang_dflow.compat import HOST_VERSION
from sglang_dflow.hooks.record import HookRecord
from sglang_dflow.serving.request_checks import request_problem

_TARGET = "sglang.srt.speculative.dflash_utils:validate_dflash_request"


def _refuse_inexact(host_problem: str | None, req: Any, enable_overlap: bool) -> str | None:
    if host_problem is not None:
        return None  # the host's own refusal stands
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_spec

    if get_spec().speculative_algorithm != "DFLOW":
        return None
    # cpu/sampling.py applies min-p; the host's CUDA verification does not.
    return request_problem(req.sampling_params, verifies_min_p=current_platform.device_type == "cpu")


def _install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TARGET.replace(":", "."), _refuse_inexact, HookType.AFTER)


REQUEST_HOOKS: tuple[HookRecord, ...] = (
    HookRecord(
        name="refuse-inexact-requests",
        target=_TARGET,
        host_version=HOST_VERSION,
        fingerprint="249cb3f605b66111",
        why="The host verifies DFLASH blocks without penalties, min_new_tokens and (on CUDA) min-p: requests that ask "
        "for them would silently get other tokens than the target alone gives.",
        how="AFTER hook: returns our refusal where the host has none; the scheduler answers 400 with it.",
        tried="CustomSpecAlgo has no per-request question; the scheduler calls this function for the DFLASH family.",
        upstream="none yet: the fault is `acc_linear_penalties` in apply_dflash_verify_logits_adjustments",
        remove_when="the host's verification applies these parameters row by row",
        test="tests/e2e/test_server.py::test_inexact_requests_are_refused",
        install=_install,
    ),
)
