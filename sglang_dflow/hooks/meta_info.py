"""One hook that shows a request's relay in its `meta_info`, beside `spec_accept_length`.

The scheduler's side needs none: `serving/metrics.py` writes a list by output token into `Req.customized_info`, which
the host carries to the tokenizer process and would show as it is. There it becomes two numbers.
"""

from __future__ import annotations

from typing import Any

from sglang_dflow.compat import HOST_VERSION
from sglang_dflow.hooks.record import HookRecord
from sglang_dflow.serving.metrics import RELAYED_KEY

_TARGET = "sglang.srt.managers.tokenizer_manager:TokenizerManager.update_request_meta_info"


def show_hit_rate(result: None, manager: Any, meta_info: dict[str, Any], state: Any, *args: Any, **kwargs: Any) -> None:
    """Replace the list by `relayed_rows` and `relay_hit_rate`; leave a request without a verified round alone."""
    by_token = meta_info.pop(RELAYED_KEY, None)
    state.customized_info_reported_keys.discard(RELAYED_KEY)  # else the host would put the list back while streaming
    rounds = [relayed for relayed in by_token or () if relayed is not None]
    if not rounds:
        return
    from sglang.srt.runtime_context import get_spec

    meta_info["relayed_rows"] = sum(rounds)
    meta_info["relay_hit_rate"] = sum(rounds) / (len(rounds) * (get_spec().speculative_num_draft_tokens - 1))


def _install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TARGET.replace(":", "."), show_hit_rate, HookType.AFTER)


META_INFO_HOOKS: tuple[HookRecord, ...] = (
    HookRecord(
        name="relay-in-meta-info",
        target=_TARGET,
        host_version=HOST_VERSION,
        fingerprint="acccc58e0ca8eb2f",
        why="A client could not see what the relay did for its request.",
        how="AFTER hook: folds the list that the scheduler sent by `customized_info` into `relayed_rows` and "
        "`relay_hit_rate`.",
        tried="`customized_info` alone: the host shows a list with one entry for every output token. Request-level "
        "keys of `SchedulerOutputStreamer` are sent with the first chunk of a stream only.",
        upstream="none yet: wants scalar request-level fields that are updated with every chunk",
        remove_when="a speculative worker can add numbers to a request's meta_info",
        test="tests/e2e/test_lives.py::test_counters_are_the_traces",
        install=_install,
    ),
)
