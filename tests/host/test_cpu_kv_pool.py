"""cpu/kv_pool.py: the real pool class of the host, built on the CPU, written and moved without Triton."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflow.cpu.kv_pool import TorchMHATokenToKVPool

LAYERS, HEADS, DIM, SIZE = 2, 2, 4, 32


def make_pool(page_size: int = 1, dtype: torch.dtype = torch.float32) -> TorchMHATokenToKVPool:
    return TorchMHATokenToKVPool(
        size=SIZE,
        page_size=page_size,
        dtype=dtype,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        enable_kv_cache_copy=True,  # the host's pool warms a Triton kernel here
    )


def rows(count: int, offset: float = 0.0) -> torch.Tensor:
    return torch.arange(count * HEADS * DIM, dtype=torch.float32).view(count, HEADS, DIM) + offset


def layer(layer_id: int) -> Any:
    return SimpleNamespace(layer_id=layer_id, k_scale=None, v_scale=None)


def test_write_reaches_only_its_layer_and_slots() -> None:
    """Catches K and V swapped, and a write into the other layer."""
    pool = make_pool()
    pool.set_kv_buffer(layer(1), torch.tensor([5, 9]), rows(2, 1.0), rows(2, 100.0))
    assert torch.equal(pool.get_key_buffer(1)[[5, 9]], rows(2, 1.0))
    assert torch.equal(pool.get_value_buffer(1)[[5, 9]], rows(2, 100.0))
    assert int(pool.get_key_buffer(1).count_nonzero(dim=(1, 2)).count_nonzero()) == 2
    assert not pool.get_key_buffer(0).any()


@pytest.mark.parametrize("page_size", [1, 16])
def test_prefix_valid_write_keeps_rejected_slots(page_size: int) -> None:
    """Rows beyond the committed length must not touch their slots: another request may own them by now."""
    pool = make_pool(page_size)
    before = torch.full((pool.get_key_buffer(0).shape[0], HEADS, DIM), -1.0)
    pool.k_buffer[0].copy_(before)
    pool.v_buffer[0].copy_(before)
    loc = torch.tensor([[20, 21, 22], [30, 31, 32]])
    commit = torch.tensor([1, 3], dtype=torch.int32)
    pool.set_kv_buffer_prefix_valid(layer(0), loc, commit, rows(6), rows(6, 500.0))
    expected_k, expected_v = before.clone(), before.clone()
    for slot, row in ((20, 0), (30, 3), (31, 4), (32, 5)):
        expected_k[slot], expected_v[slot] = rows(6)[row], rows(6, 500.0)[row]
    # Slot 0 is the padding slot: it may hold anything.
    assert torch.equal(pool.get_key_buffer(0)[1:], expected_k[1:])
    assert torch.equal(pool.get_value_buffer(0)[1:], expected_v[1:])


def test_prefix_valid_write_refuses_other_shapes() -> None:
    pool = make_pool()
    with pytest.raises(ValueError, match="expected loc_2d"):
        pool.set_kv_buffer_prefix_valid(layer(0), torch.zeros(2, 3, dtype=torch.int64), torch.ones(3), rows(6), rows(6))


def test_move_copies_all_layers() -> None:
    """Catches a move that launches the host's Triton copy, or overlapping source and target."""
    pool = make_pool()
    for index in range(LAYERS):
        pool.set_kv_buffer(layer(index), torch.tensor([3, 4]), rows(2, 10.0 * index), rows(2, 7.0))
    pool.move_kv_cache(torch.tensor([4, 8]), torch.tensor([3, 4]))
    for index in range(LAYERS):
        assert torch.equal(pool.get_key_buffer(index)[[4, 8]], rows(2, 10.0 * index))


def test_quantised_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="--kv-cache-dtype"):
        make_pool(dtype=torch.float8_e4m3fn)
