"""A second SGLang plugin, loaded into the server of `benchmarks.relay_cost` alone: rounds with and without the relay.

Every request that prefills switches sides: with the relay, then without (no pool, as with `SGLANG_DFLOW_RELAY=off`,
which drafts exactly as the host's DFLASH), each from a draft graph of its own. Both sides so share the process, its
memory and its threads. A round is the time between two calls of the worker for one request, scheduler included.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "SGLANG_DFLOW_TOGGLE_TRACE"


def register() -> None:
    """Wrap the worker's round; called by the host's plugin loader."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang_dflow.serving.worker.DFlowWorker.forward_batch_generation",
        Toggle(Path(os.environ[VARIABLE])).around,
        HookType.AROUND,
    )


class Toggle:
    """Which side serves, and when the last round ended."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace
        self._requests = 0
        self._ended: float | None = None
        self._sides: dict[bool, tuple[Any, Any]] = {}  # with the relay -> pool, draft graph runner

    def around(self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Switch at a prefill; write `[request, relay, seconds]` for every round behind another one."""
        prefills = batch.forward_mode.is_extend() or batch.is_extend_in_batch
        if prefills:
            self._requests += 1
            self._ended = None
            self._switch(worker)
        result = original(worker, batch, *args, **kwargs)
        if not prefills:
            now = time.perf_counter()
            if self._ended is not None:
                with self._trace.open("a") as sink:
                    sink.write(json.dumps([self._requests, self._relay, now - self._ended]) + "\n")
            self._ended = now
        return result

    @property
    def _relay(self) -> bool:
        return self._requests % 2 == 1

    def _switch(self, worker: Any) -> None:
        runner = worker.draft_model_runner
        if not self._sides:
            from sglang_dflow.cpu.graph_runner import DraftGraphRunner

            graph = runner.prefill_cuda_graph_runner
            plain = None if graph is None else DraftGraphRunner(runner, max_batch_size=graph.buckets[-1])
            self._sides = {True: (worker._pool, graph), False: (None, plain)}
        pool, runner.prefill_cuda_graph_runner = self._sides[self._relay]
        worker._pool = worker.draft_model._pool = pool
