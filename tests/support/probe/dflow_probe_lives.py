"""The part of the probe that follows requests through their lives, and breaks single rules on demand.

{"lives": FILE}      one JSON line per iteration of the worker: which requests, slots, positions, rows
{"switches": DIR}    while DIR/keep exists, prefill empties no row; while DIR/nan exists, stored states are NaN
{"pure": true}       a host read in our decode path raises
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOST_READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
DECODE_PATH = ("sglang_dflow.relay.", "sglang_dflow.serving.")
NOT_DECODE = ("relay_state", "consume")
"""`/server_info`, and the counting of rounds that the host's copy has brought to the CPU already."""


def register(wanted: dict[str, Any]) -> None:
    if "lives" in wanted:
        _follow(wanted["lives"])
    if "switches" in wanted:
        _switches(Path(wanted["switches"]))
    if wanted.get("pure"):
        import torch

        forbid_host_reads(lambda name, method: setattr(torch.Tensor, name, method))


def _follow(path: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def write(**entry: Any) -> None:
        with open(path, "a") as sink:
            sink.write(json.dumps(entry) + "\n")

    def around(original: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        common = {"rids": [req.rid for req in batch.reqs], "slots": batch.req_pool_indices.tolist()}
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            write(kind="extend", extend_lens=list(batch.extend_lens or ()), **common)
            return original(worker, batch, *args, **kwargs)
        prefix_lens, enabled = batch.seq_lens.tolist(), bool(worker._pool.enabled)
        result = original(worker, batch, *args, **kwargs)
        accept_lens = (result.accept_lens - 1).tolist()
        relayed = worker._pool.last_rounds(batch.req_pool_indices)[:, 0].tolist()
        write(
            kind="round", prefix_lens=prefix_lens, accept_lens=accept_lens, relayed=relayed, enabled=enabled, **common
        )
        return result

    def forget(result: Any, worker: Any) -> None:
        write(kind="forget")

    worker = "sglang_dflow.serving.worker.DFlowWorker"
    HookRegistry.register(f"{worker}.forward_batch_generation", around, HookType.AROUND)
    HookRegistry.register(f"{worker}.forget_relayed", forget, HookType.AFTER)


def _switches(directory: Path) -> None:
    from sglang_dflow.relay.pool import RelayPool

    invalidate, store = RelayPool.invalidate, RelayPool.store

    def switched_invalidate(self: RelayPool, req_pool_indices: Any) -> None:
        if not (directory / "keep").exists():
            invalidate(self, req_pool_indices)

    def switched_store(self: RelayPool, req_pool_indices: Any, block: Any) -> None:
        if (directory / "nan").exists():
            block = block._replace(hidden=block.hidden * float("nan"))
        store(self, req_pool_indices, block)

    RelayPool.invalidate = switched_invalidate  # type: ignore[method-assign]
    RelayPool.store = switched_store  # type: ignore[method-assign]


def forbid_host_reads(patch: Callable[[str, Any], None]) -> None:
    """Make every way to read a tensor on the host raise when it is our decode path that asks.

    `patch(name, method)` sets a method of `torch.Tensor`.
    """
    import torch

    def guarded(name: str, original: Any) -> Any:
        def read(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            module = caller.f_globals.get("__name__", "")
            if module.startswith(DECODE_PATH) and caller.f_code.co_name not in NOT_DECODE:
                raise AssertionError(f"host read in the decode path: Tensor.{name} in {module}.{caller.f_code.co_name}")
            return original(*args, **kwargs)

        return read

    for name in HOST_READS:
        patch(name, guarded(name, getattr(torch.Tensor, name)))
