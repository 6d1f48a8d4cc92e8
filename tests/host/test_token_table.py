"""serving/worker.py: which embeddings the kernels may read as a table, and which must be called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from sglang_dflow.relay.draft_input import TokenTable
from sglang_dflow.serving.worker import DFlowWorker


def _embedding(kind: type = VocabParallelEmbedding, **changed: Any) -> Any:
    """The host's module without its distributed constructor."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    plain = {
        "tp_size": 1,
        "num_added_embeddings": 0,
        "output_dtype": None,
        "quant_method": UnquantizedEmbeddingMethod(),
    }
    for name, value in (plain | changed).items():
        setattr(module, name, value)
    module.weight = torch.nn.Parameter(torch.arange(12.0).view(6, 2))
    module.forward = lambda ids: module.weight[ids] + 100  # told apart from the table
    return module


def _embed_tokens(module: Any, *, scale: float = 1.0, full_table: torch.Tensor | None = None) -> Any:
    worker: Any = DFlowWorker.__new__(DFlowWorker)
    worker._full_embed_gpu, worker._noise_embed_scale = full_table, scale
    worker.draft_model = SimpleNamespace()
    model = SimpleNamespace(get_input_embeddings=lambda: module)
    worker._target_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    return worker._embed_tokens()


def test_plain_embedding_is_read_as_a_table() -> None:
    """By the module's own parameter, so that an online weight update is seen; scaled as the host scales it."""
    module = _embedding()
    embed = _embed_tokens(module, scale=3.0)
    assert isinstance(embed, TokenTable)
    assert embed.weight is module.weight
    assert torch.equal(embed(torch.tensor([5, 0])), torch.tensor([[30.0, 33.0], [0.0, 3.0]]))


class _Scaling(VocabParallelEmbedding):
    pass


@pytest.mark.parametrize(
    "module",
    [
        _embedding(tp_size=2),
        _embedding(num_added_embeddings=1),
        _embedding(output_dtype=torch.float32),
        _embedding(quant_method=object()),
        _embedding(_Scaling),
    ],
    ids=["vocabulary parallel", "added tokens", "other output dtype", "quantised", "subclass"],
)
def test_every_other_embedding_is_called(module: Any) -> None:
    """Its table alone would be wrong: a shard, packed, or scaled inside."""
    embed = _embed_tokens(module, scale=2.0)
    assert not isinstance(embed, TokenTable)
    assert torch.equal(embed(torch.tensor([1])), torch.tensor([[204.0, 206.0]]))


def test_full_table_under_data_parallel_attention() -> None:
    table = torch.ones(6, 2)
    embed = _embed_tokens(_embedding(tp_size=2), full_table=table)
    assert isinstance(embed, TokenTable) and embed.weight is table
