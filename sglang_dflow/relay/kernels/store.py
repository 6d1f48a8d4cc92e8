"""After verification: a block's projected states and its rejection boundary into the pool, one launch.

    pool.hidden[i] = h        pool.row_stats[i] = mean(h), var(h) over the features, of the values as stored
    pool.next_prefix_len[i] = P + a + 1     pool.rejected[i] = candidates[min(a + 1, B - 1)]     (i = req_pool_indices)
    pool.accept_len[i] = a    pool.bonus[i] = b    [pool.stale[i] = the target's top-1 at every row]

One program copies one row and, since the row is in its registers, leaves its statistics for `relay_apply`'s LayerNorm.
Reference: `RelayPool.store` without kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflow.relay.kernels.tiles import expect
from sglang_dflow.relay.pool import RelayPool, VerifiedBlock


def store_bytes(*, batch_size: int, block_size: int, hidden_size: int, itemsize: int, stale_token: bool) -> int:
    """Bytes that the launch moves: every state read and written, statistics and integers."""
    row = 2 * hidden_size * itemsize + 8 + (16 if stale_token else 0)
    return batch_size * (block_size * row + 5 * 8 + 5 * 8)


@triton.jit(do_not_specialize=["B"])
def _relay_store_kernel(
    req_pool_indices,  # [bs]
    hidden,  # [bs, B, H]
    prefix_lens,  # [bs]
    accept_len,  # [bs]
    bonus,  # [bs]
    candidates,  # [bs, B]
    stale,  # [bs, B] or None
    pool_hidden,  # [num_rows, B, H]
    pool_row_stats,  # [num_rows, B, 2]
    pool_next_prefix_len,  # [num_rows]
    pool_accept_len,  # [num_rows]
    pool_bonus,  # [num_rows]
    pool_rejected,  # [num_rows]
    pool_stale,  # [num_rows, B] or None
    pool_rounds,  # [num_rows, 4]
    H,
    B,
    BLOCK_H: tl.constexpr,
):
    request = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(req_pool_indices + request)
    column = tl.arange(0, BLOCK_H)
    inside = column < H

    state = tl.load(hidden + (request * B + row) * H + column, mask=inside, other=0.0)
    stored = state.to(pool_hidden.dtype.element_ty)
    tl.store(pool_hidden + (slot * B + row) * H + column, stored, mask=inside)
    values = stored.to(tl.float32)
    mean = tl.sum(values, axis=0) / H
    centred = tl.where(inside, values - mean, 0.0)
    tl.store(pool_row_stats + (slot * B + row) * 2, mean)
    tl.store(pool_row_stats + (slot * B + row) * 2 + 1, tl.sum(centred * centred, axis=0) / H)
    if stale is not None:
        tl.store(pool_stale + slot * B + row, tl.load(stale + request * B + row).to(tl.int64))

    if row == 0:
        accepted = tl.load(accept_len + request).to(tl.int64)
        boundary = tl.minimum(accepted + 1, B - 1)
        tl.store(pool_accept_len + slot, accepted)
        tl.store(pool_rounds + slot * 4 + 3, accepted)
        tl.store(pool_next_prefix_len + slot, tl.load(prefix_lens + request).to(tl.int64) + accepted + 1)
        tl.store(pool_bonus + slot, tl.load(bonus + request).to(tl.int64))
        tl.store(pool_rejected + slot, tl.load(candidates + request * B + boundary).to(tl.int64))


def relay_store(pool: RelayPool, req_pool_indices: torch.Tensor, block: VerifiedBlock) -> None:
    """Write a verified block, one pool row per request; `req_pool_indices` int64 [bs], distinct and non-zero.

    Raises:
        ValueError: a tensor has another shape, dtype or layout than `VerifiedBlock` says.
    """
    batch_size = req_pool_indices.shape[0]
    if batch_size == 0:
        return
    _, block_size, hidden_size = pool.hidden.shape
    assert pool.row_stats is not None
    integers = (torch.int32, torch.int64)
    expect("relay_store", "hidden", block.hidden, (batch_size, block_size, hidden_size))
    for name, tensor in (("prefix_lens", block.prefix_lens), ("accept_len", block.accept_len), ("bonus", block.bonus)):
        expect("relay_store", name, tensor, (batch_size,), *integers)
    expect("relay_store", "candidates", block.candidates, (batch_size, block_size), *integers)
    if pool.stale is not None:
        assert block.stale is not None
        expect("relay_store", "stale", block.stale, (batch_size, block_size), *integers)
    block_h = triton.next_power_of_2(hidden_size)
    _relay_store_kernel[(batch_size, block_size)](
        req_pool_indices,
        block.hidden,
        block.prefix_lens,
        block.accept_len,
        block.bonus,
        block.candidates,
        block.stale if pool.stale is not None else None,
        pool.hidden,
        pool.row_stats,
        pool.next_prefix_len,
        pool.accept_len,
        pool.bonus,
        pool.rejected,
        pool.stale,
        pool.rounds,
        hidden_size,
        block_size,
        BLOCK_H=block_h,
        num_warps=4 if block_h <= 2048 else 8,
    )
