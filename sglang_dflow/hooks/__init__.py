"""The run-time hooks of the product: the places of the host that no seam and no subclass reaches.

`HOOKS` are installed wherever DFLOW is registered; `sglang_dflow.cpu.hooks.CPU_HOOKS` only on the CPU platform.
"""

from __future__ import annotations

from sglang_dflow.hooks.finish import FINISH_HOOKS
from sglang_dflow.hooks.internal_state import INTERNAL_STATE_HOOKS
from sglang_dflow.hooks.lora import LORA_HOOKS
from sglang_dflow.hooks.meta_info import META_INFO_HOOKS
from sglang_dflow.hooks.record import HookRecord
from sglang_dflow.hooks.requests import REQUEST_HOOKS
from sglang_dflow.hooks.weight_update import WEIGHT_UPDATE_HOOKS

HOOKS: tuple[HookRecord, ...] = (
    *FINISH_HOOKS,
    *INTERNAL_STATE_HOOKS,
    *LORA_HOOKS,
    *META_INFO_HOOKS,
    *REQUEST_HOOKS,
    *WEIGHT_UPDATE_HOOKS,
)
