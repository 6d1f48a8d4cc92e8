"""A second SGLang plugin, loaded into the instrumented server of `sglang-dflow bench cost` and no other.

Wraps the parts of a speculative round with a nested timer and writes one JSON line per call of the worker. `install`
makes a directory that the host finds the plugin through when it is on PYTHONPATH: nothing is installed, and nothing of
it is in the product's decode path.

On CUDA the device is synchronised at every boundary, so the parts are device times of a run without overlap, and what
a CUDA graph holds is one part: the relay is inside `draft` there (compare with the relay off).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "SGLANG_DFLOW_COST_TRACE"

_HOST_WORKER = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"
_WORKER = "sglang_dflow.serving.worker.DFlowWorker"
ROUND = f"{_WORKER}.forward_batch_generation"

PARTS = {
    "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation": "verify",
    "sglang.srt.model_executor.model_runner.ModelRunner.forward": "draft",
    f"{_HOST_WORKER}._greedy_sample_from_vocab_parallel_head": "draft",
    "sglang_dflow.cpu.linear.PackedHeadMethod.apply": "draft",  # the CPU platform replaces the method above
    "sglang_dflow.serving.draft_model.RelayMixin._relayed": "relay apply",
    f"{_WORKER}._append_target_hidden_to_draft_kv_by_loc": "relay store",
    f"{_HOST_WORKER}._append_target_hidden_to_draft_kv_by_loc": "draft KV",
    f"{_WORKER}._accept_block": "accept",
}
"""Method -> the part that its time belongs to, less the time of the methods called inside it."""


class NestedTimer:
    """Adds up the time of each part without that of the parts inside it."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._open: list[tuple[str, float, float]] = []  # part, start, seconds of the parts inside
        self.seconds: dict[str, float] = {}

    def within(self, part: str) -> bool:
        """Whether `part` is being timed."""
        return any(name == part for name, _, _ in self._open)

    def enter(self, part: str) -> None:
        self._open.append((part, self._now(), 0.0))

    def leave(self) -> tuple[float, float]:
        """Close the innermost part; return its start and end."""
        part, start, inside = self._open.pop()
        end = self._now()
        self.seconds[part] = self.seconds.get(part, 0.0) + end - start - inside
        if self._open:
            outer, its_start, its_inside = self._open[-1]
            self._open[-1] = (outer, its_start, its_inside + end - start)
        return start, end


def install(directory: Path, module: str = __name__) -> str:
    """Make `directory` a place that the host finds a plugin `module` through; return the PYTHONPATH that does it."""
    name = module.replace(".", "_")
    info = directory / f"{name}-0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {module}:register\n")
    return os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH", ""))))


def register() -> None:
    """Wrap the methods; called by the host's plugin loader."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    timer = NestedTimer(_clock())
    trace = Path(os.environ[VARIABLE])
    HookRegistry.register(ROUND, _round(timer, trace), HookType.AROUND)
    for method, part in PARTS.items():
        HookRegistry.register(method, _timed(timer, part), HookType.AROUND)


def _clock() -> Callable[[], float]:
    import torch

    if not torch.cuda.is_available():
        return time.perf_counter

    def synchronised() -> float:
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return time.perf_counter()

    return synchronised


def _timed(timer: NestedTimer, part: str) -> Callable[..., Any]:
    def around(original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        if part == "draft" and timer.within("verify"):  # the target's runner and head
            return original(owner, *args, **kwargs)
        timer.enter(part)
        try:
            return original(owner, *args, **kwargs)
        finally:
            timer.leave()

    return around


def _round(timer: NestedTimer, trace: Path) -> Callable[..., Any]:
    def around(original: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        timer.seconds = {}
        decodes = not (batch.forward_mode.is_extend() or batch.is_extend_in_batch)
        requests = len(batch.seq_lens)
        timer.enter("worker")
        try:
            result = original(worker, batch, *args, **kwargs)
        finally:
            start, end = timer.leave()
        if worker._target_tp_rank == 0:  # one rank tells for all
            record = {"decodes": decodes, "requests": requests, "start": start, "end": end, "parts": timer.seconds}
            with trace.open("a") as sink:
                sink.write(json.dumps(record) + "\n")
        return result

    return around
