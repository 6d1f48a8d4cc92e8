"""The relay pool is part of the host's memory budget: allocated before the host sizes its KV cache by what is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

from sglang_dflow.relay.alignment import RelayRule, RelaySource
from sglang_dflow.serving.settings import RelaySettings
from sglang_dflow.serving.worker import DFlowWorker

B, H, MAX_RUNNING = 16, 1024, 48
BUDGET, CELL = 1 << 28, 2048
"""Bytes of a small device that are free without the relay, and bytes of one token's KV."""


def _worker(monkeypatch: pytest.MonkeyPatch, **server_args: Any) -> Any:
    """A worker whose host half only brings what the relay's half reads."""

    def host_init(self: Any) -> None:
        target = SimpleNamespace(get_input_embeddings=lambda: torch.nn.Embedding(8, H))
        self._target_worker = SimpleNamespace(model_runner=SimpleNamespace(model=target))
        self.model_runner = self._target_worker.model_runner
        self.block_size, self.device = B, "cpu"
        self._full_embed_gpu, self._noise_embed_scale = None, 1.0
        self.draft_model_runner = SimpleNamespace(dtype=torch.bfloat16)
        rule = RelayRule.of(RelaySource.SUFFIX, shift_label=False)
        config = SimpleNamespace(hidden_size=H, rule=rule, relay_stale_token=False, relay_rescore_size=0)
        relay = SimpleNamespace(relay_rescore=None)
        self.draft_model = SimpleNamespace(dflow_config=config, relay=relay, attach_relay=lambda *args: None)

    monkeypatch.setattr(DFlashWorkerV2, "__init__", host_init)
    with get_context().override_server_args(device="cpu", max_running_requests=MAX_RUNNING, **server_args):
        return DFlowWorker()


def _tokens_sized(monkeypatch: pytest.MonkeyPatch, worker: Any) -> int:
    """Tokens of the KV cache by the host's own functions, on a device that holds this worker."""
    used = 0 if worker._pool is None else worker._pool.nbytes
    monkeypatch.setattr(kv_cache_configurator, "get_available_gpu_memory", lambda *a, **k: (BUDGET - used) / 2**30)
    kvc: Any = SimpleNamespace(
        device="cpu", gpu_id=0, mambaish_config=None, model_config=SimpleNamespace(is_multimodal=False)
    )
    sizes = DefaultPoolConfigurator.__new__(DefaultPoolConfigurator)
    sizes._cell_size, sizes._fixed_overhead_bytes = CELL, 0
    with get_context().override_server_args(device="cpu", mem_fraction_static=1.0, cuda_graph_config=CudaGraphConfig()):
        parallel = SimpleNamespace(launch_world_size=1, world_group=SimpleNamespace(cpu_group=None))
        monkeypatch.setattr(kv_cache_configurator, "get_parallel", lambda: parallel)
        budget = KVCacheConfigurator._profile_available_bytes(kvc, pre_model_load_memory=BUDGET)
    return int(sizes.calculate_pool_sizes(budget, page_size=1).max_total_num_tokens)


def test_the_host_sizes_its_kv_cache_without_the_pools_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a pool that is allocated after the KV cache has taken the memory: the launch then fails on a full GPU."""
    monkeypatch.setenv(RelaySettings.VARIABLE, "off")
    without = _tokens_sized(monkeypatch, _worker(monkeypatch))
    monkeypatch.setenv(RelaySettings.VARIABLE, "on")
    worker = _worker(monkeypatch)
    nbytes = (MAX_RUNNING + 1) * (B * H * 2 + 64) + 1
    assert worker._pool.nbytes == nbytes
    assert without == BUDGET // CELL
    assert without - _tokens_sized(monkeypatch, worker) == -(-nbytes // CELL)


def test_a_request_pool_with_more_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request beyond the relay's rows would write another's memory: better no server."""
    worker = _worker(monkeypatch)
    monkeypatch.setattr(DFlashWorkerV2, "alloc_memory_pool", lambda *args, **kwargs: None)
    worker.model_runner.req_to_token_pool = SimpleNamespace(req_to_token=torch.zeros(MAX_RUNNING + 2, 1))
    with pytest.raises(RuntimeError, match=r"49 rows, but the host's request pool has 50"):
        worker.alloc_memory_pool()


def test_a_decode_server_has_rows_for_requests_in_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's request pool has slots for them beyond the running requests; elsewhere the option has no effect."""
    extra = {"disaggregation_decode_extra_slots": 7}
    assert _worker(monkeypatch, **extra)._pool.hidden.shape[0] == MAX_RUNNING + 1
    assert _worker(monkeypatch, disaggregation_mode="decode", **extra)._pool.hidden.shape[0] == MAX_RUNNING + 1 + 7
