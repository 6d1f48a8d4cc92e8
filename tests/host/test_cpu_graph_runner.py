"""cpu/graph_runner.py over a stand-in model: buckets, padding, new weights, the switch.

The host's own draft models go through it in test_parity.py, the real server in tests/e2e/test_exactness.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dflow.cpu import GRAPH_SWITCH, graph_runner
from sglang_dflow.cpu.graph_runner import DraftGraphRunner, install_draft_graph_runner

B, H = 2, 3


class Model:
    """Adds up everything that a row of a batch brings; `load_weights` replaces its weight as repacking does."""

    def __init__(self) -> None:
        self.weight = torch.ones(H)
        self.forwards = 0

    def load_weights(self, value: float) -> None:
        self.weight = torch.full((H,), value)

    def forward(self, input_ids: Any, positions: Any, batch: Any, input_embeds: torch.Tensor) -> Any:
        self.forwards += 1
        per_row = input_ids + 10 * positions + 100 * batch.out_cache_loc  # [bs * B]
        per_request = (1000 * batch.req_pool_indices + 10000 * batch.seq_lens).repeat_interleave(B)
        return SimpleNamespace(hidden_states=(input_embeds + (per_row + per_request).unsqueeze(1)) * self.weight)


class Backend:
    """Keeps the batches that were planned, as they were at that moment."""

    def __init__(self) -> None:
        self.planned: list[dict[str, Any]] = []

    def init_forward_metadata(self, batch: Any) -> None:
        fields = {name: getattr(batch, name).tolist() for name in ("seq_lens", "req_pool_indices", "out_cache_loc")}
        self.planned.append({"size": batch.batch_size, **fields})


def _batch(size: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def ints(count: int) -> torch.Tensor:
        return torch.randint(1, 9, (count,), generator=generator)

    return SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=size,
        input_ids=ints(size * B),
        positions=ints(size * B),
        out_cache_loc=ints(size * B),
        req_pool_indices=ints(size),
        seq_lens=ints(size),
        input_embeds=torch.randn(size * B, H, generator=generator),
        global_num_tokens_cpu=None,
    )


def _runner(max_batch_size: int = 6) -> tuple[DraftGraphRunner, Model, Backend]:
    model, backend = Model(), Backend()
    return (
        DraftGraphRunner(SimpleNamespace(model=model, attn_backend=backend), max_batch_size=max_batch_size),
        model,
        backend,
    )


def test_every_batch_size_replays_as_eager() -> None:
    """Catches a baked input, rows of an earlier batch in a smaller one, and a capture at every use."""
    runner, model, _ = _runner()
    for seed, size in enumerate([1, 3, 6, 2, 5, 4, 1, 3, 6]):
        batch = _batch(size, seed)
        found = runner.execute(batch, input_embeds=batch.input_embeds).hidden_states
        expected = Model().forward(batch.input_ids, batch.positions, batch, batch.input_embeds).hidden_states
        assert torch.equal(found, expected), (seed, size)
    assert model.forwards == 2 * len(runner.buckets) == 2 * 4, "warm-up and capture of buckets 1, 2, 4 and 6"


def test_padded_rows_are_the_hosts() -> None:
    """Slot and request 0, length 1, also after a larger batch has filled those rows."""
    runner, _, backend = _runner()
    for size in (4, 3):
        batch = _batch(size, size)
        runner.execute(batch, input_embeds=batch.input_embeds)
    last = backend.planned[-1]
    assert last["size"] == 4
    assert (last["seq_lens"][3:], last["req_pool_indices"][3:], last["out_cache_loc"][3 * B :]) == ([1], [0], [0] * B)


def test_loading_weights_captures_again() -> None:
    """Packed weights are rebuilt in other storage: an old graph would draft with the old model for ever."""
    runner, model, _ = _runner()
    batch = _batch(2, 0)
    before = runner.execute(batch, input_embeds=batch.input_embeds).hidden_states.clone()
    model.load_weights(3.0)
    assert torch.equal(runner.execute(batch, input_embeds=batch.input_embeds).hidden_states, before * 3.0)


def test_takes_draft_blocks_that_fit() -> None:
    runner, _, _ = _runner(max_batch_size=6)
    assert runner.can_run_graph(_batch(6, 0))
    for name, value in {
        "forward_mode": ForwardMode.EXTEND,
        "batch_size": 7,
        "input_embeds": None,
        "global_num_tokens_cpu": [8, 8],
    }.items():
        batch = _batch(6, 0)
        setattr(batch, name, value)
        assert not runner.can_run_graph(batch), name


@pytest.mark.parametrize(("word", "tp_size", "installed"), [("on", 1, True), ("off", 1, False), ("on", 2, False)])
def test_the_switch_and_the_ranks(monkeypatch: pytest.MonkeyPatch, word: str, tp_size: int, installed: bool) -> None:
    """Several ranks draft eagerly: a collective is no operation of a captured graph here."""
    monkeypatch.setenv(GRAPH_SWITCH, word)
    monkeypatch.setattr(graph_runner, "get_parallel", lambda: SimpleNamespace(tp_size=tp_size))
    runner = SimpleNamespace(model=Model(), max_running_requests=4, prefill_cuda_graph_runner=None)
    install_draft_graph_runner(SimpleNamespace(draft_model_runner=runner))
    assert isinstance(runner.prefill_cuda_graph_runner, DraftGraphRunner) == installed
