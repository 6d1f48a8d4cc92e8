"""Replays the draft forward from a graph, as the host's CUDA graph runner does on a GPU.

The host keeps its decode graph runner off CPU devices by name, but asks whatever stands in the draft runner's
`prefill_cuda_graph_runner` (a draft block is extend-shaped): `DraftGraphRunner` takes that place, put there by the
hook `cpu-draft-graph`. One graph per batch bucket, captured at the bucket's first use after one eager warm-up; all
inputs are static buffers of the largest bucket, padded rows have `req_pool_indices` 0 and slot 0 as on a GPU. Attention
stays one opaque operation (cpu/attention.py). `SGLANG_DFLOW_CPU_GRAPH=off` drafts eagerly.

Relies on SGLang 0.5.23: `ModelRunner._forward_raw`, the fields of `ForwardBatch` that `DFlashWorkerV2` fills for a
draft block, `init_forward_metadata` of our attention backend. Limits: one rank (no collectives in a graph).
"""

from __future__ import annotations

import bisect
import copy
import functools
import logging
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.runtime_context import get_parallel

from sglang_dflow.cpu import GRAPH_SWITCH
from sglang_dflow.cpu.graph_capture import Replay, capture
from sglang_dflow.serving.settings import read_switch

logger = logging.getLogger(__name__)

# Padding costs arithmetic here, not only memory: 3 requests in a bucket of 4 draft a third more rows.
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)

_PADDING = {"input_ids": 0, "positions": 0, "out_cache_loc": 0, "req_pool_indices": 0, "seq_lens": 1}
"""Fields of a padded row, the host's own values. Padded embeddings keep what they hold: nothing reads their rows."""


class _Bucket(NamedTuple):
    batch: Any  # ForwardBatch whose tensors are views of the static buffers
    replay: Replay


class DraftGraphRunner:
    """Captures and replays one draft model's forward; one instance per draft worker."""

    def __init__(self, model_runner: Any, *, max_batch_size: int) -> None:
        self.model_runner = model_runner
        self.buckets = [*(size for size in BUCKETS if size < max_batch_size), max_batch_size]
        self._buffers: dict[str, torch.Tensor] = {}
        self._captured: dict[int, _Bucket] = {}
        _forget_on_load(model_runner.model, self._captured)

    def can_run_graph(self, forward_batch: Any) -> bool:
        """Whether this is a draft block that fits a bucket; asked by the host."""
        return (
            forward_batch.forward_mode.is_target_verify()
            and forward_batch.input_embeds is not None
            and forward_batch.global_num_tokens_cpu is None
            and forward_batch.batch_size <= self.buckets[-1]
        )

    def execute(self, forward_batch: Any, *, input_embeds: torch.Tensor, **unused: Any) -> LogitsProcessorOutput:
        """Draft one block per request by replay; called by the host in place of the model's forward."""
        size = self.buckets[bisect.bisect_left(self.buckets, forward_batch.batch_size)]
        self._fill(forward_batch, input_embeds, size)
        if size not in self._captured:
            self._captured[size] = self._capture(forward_batch, size)
        batch, replay = self._captured[size]
        self.model_runner.attn_backend.init_forward_metadata(batch)
        hidden = replay()
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden[: input_embeds.shape[0]])

    def _fill(self, forward_batch: Any, input_embeds: torch.Tensor, size: int) -> None:
        live = {name: getattr(forward_batch, name) for name in _PADDING} | {"input_embeds": input_embeds}
        for name, value in live.items():
            rows = value.shape[0] // forward_batch.batch_size  # per request: 1 or the block size
            if name not in self._buffers:
                self._buffers[name] = value.new_zeros((self.buckets[-1] * rows, *value.shape[1:]))
            buffer = self._buffers[name]
            buffer[: value.shape[0]].copy_(value)
            if name in _PADDING and forward_batch.batch_size < size:
                buffer[value.shape[0] : size * rows].fill_(_PADDING[name])

    def _capture(self, forward_batch: Any, size: int) -> _Bucket:
        views = {name: buffer[: size * (buffer.shape[0] // self.buckets[-1])] for name, buffer in self._buffers.items()}
        batch = copy.copy(forward_batch)
        for name, value in {"batch_size": size, **views}.items():
            setattr(batch, name, value)
        model = self.model_runner.model

        def forward() -> torch.Tensor:
            output = model.forward(batch.input_ids, batch.positions, batch, input_embeds=batch.input_embeds)
            hidden: torch.Tensor = output.hidden_states
            return hidden

        self.model_runner.attn_backend.init_forward_metadata(batch)
        forward()  # packs weights and builds tables, which must exist before they are captured
        replay = capture(forward)
        logger.info("Captured the draft forward for %d requests.", size)
        return _Bucket(batch, replay)


def _forget_on_load(model: Any, captured: dict[int, _Bucket]) -> None:
    """Drop the graphs when the model loads weights again: packed weights are rebuilt elsewhere (cpu/linear.py)."""
    load_weights = model.load_weights

    @functools.wraps(load_weights)
    def load_and_forget(*args: Any, **kwargs: Any) -> Any:
        try:
            return load_weights(*args, **kwargs)
        finally:
            captured.clear()

    model.load_weights = load_and_forget


def install_draft_graph_runner(worker: Any) -> None:
    """Give a DFLASH-family worker's draft runner its graph runner, unless it is switched off or has several ranks."""
    runner = worker.draft_model_runner
    if read_switch(GRAPH_SWITCH) and get_parallel().tp_size == 1:
        runner.prefill_cuda_graph_runner = DraftGraphRunner(runner, max_batch_size=int(runner.max_running_requests))
