"""The relay's second linear, its LayerNorm and the addition to the mask embeddings, in place, in one launch.

    [beta ; gamma] = W2 activation + bias2
    x += beta * ((h - mean) / sqrt(var + eps) * weight + bias) + gamma        for relayed rows; others keep their bits

A tile of features needs the same columns of beta and of gamma, so both products run side by side and neither is
written to memory; mean and variance were left by `relay_store`. A relayed row whose result is not finite keeps its
bits: a state with a NaN or an infinity makes its whole row so, in every tile; a mere overflow (float16) keeps only the
tile that overflows, where the torch path refuses the row. What became of each request's rows is left in `pool.rounds`.

Reference: `RelayModulation.forward` and the rest of `draft_input.relayed_input`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflow.relay.kernels.tiles import DotTile, RowTile, expect, relayed_lines
from sglang_dflow.relay.modulation import RelayModulation
from sglang_dflow.relay.pool import EMPTY, RelayPool


def apply_bytes(*, batch_size: int, num_rows: int, hidden_size: int, width: int, itemsize: int) -> int:
    """Bytes that the launch has to move, weights once (more row tiles read them again, from the L2 cache)."""
    weights = 2 * hidden_size * (width + 1) + 2 * hidden_size
    rows = batch_size * num_rows * (width + 3 * hidden_size)
    return itemsize * (weights + rows) + batch_size * 8 * (6 + 2 * num_rows)


def apply_operations(*, batch_size: int, num_rows: int, hidden_size: int, width: int) -> int:
    """Multiplications and additions of the product; the LayerNorm's dozen a feature are left out."""
    return 4 * batch_size * num_rows * hidden_size * width


@triton.jit(do_not_specialize=["bs"])
def _relay_apply_kernel(
    blocks,  # [bs, B, H]
    activations,  # [bs * R, W]
    req_pool_indices,  # [bs]
    positions,  # [bs, B]
    next_prefix_len,  # [num_rows]
    accept_len,  # [num_rows]
    enabled,  # [1]
    hidden,  # [num_rows, B, H]
    row_stats,  # [num_rows, B, 2]
    rounds,  # [num_rows, 4]
    weight,  # [2H, W]
    bias,  # [2H]
    norm_weight,  # [H]
    norm_bias,  # [H]
    bs,
    H,
    W,
    eps,
    B: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    SHIFT: tl.constexpr,
    EMPTY: tl.constexpr,
    REQUESTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    first_request = tl.program_id(0) * REQUESTS
    request, row, slot, source, relayed = relayed_lines(
        req_pool_indices, positions, next_prefix_len, accept_len, enabled, first_request, bs,
        B, FIRST_ROW, SHIFT, REQUESTS, ROWS,
    )  # fmt: skip
    # A tile without relayed rows multiplies nothing.
    width = W * tl.max(relayed.to(tl.int32), axis=0)
    line = request * (B - FIRST_ROW) + (row - FIRST_ROW)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < H
    inputs = activations + line.to(tl.int64) * W
    # Lines without relay multiply whatever memory holds, for nothing: their results are not stored. Masking them here,
    # too, would make the loop wait for the pool's integers.
    present = (request < bs) & (row < B)
    beta_weights = weight + n.to(tl.int64) * W
    gamma_weights = beta_weights + H.to(tl.int64) * W
    beta = tl.zeros((REQUESTS * ROWS, BLOCK_N), dtype=tl.float32)
    gamma = tl.zeros((REQUESTS * ROWS, BLOCK_N), dtype=tl.float32)
    feature = tl.arange(0, BLOCK_K)
    for start in range(0, width, BLOCK_K):
        k = start + feature
        x = tl.load(inputs[:, None] + k[None, :], mask=present[:, None] & (k < W)[None, :], other=0.0)
        in_weights = inside[None, :] & (k < W)[:, None]
        to_beta = tl.load(beta_weights[None, :] + k[:, None], mask=in_weights, other=0.0)
        to_gamma = tl.load(gamma_weights[None, :] + k[:, None], mask=in_weights, other=0.0)
        beta = tl.dot(x, to_beta, beta, input_precision="ieee")
        gamma = tl.dot(x, to_gamma, gamma, input_precision="ieee")
    beta += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    gamma += tl.load(bias + H + n, mask=inside, other=0.0).to(tl.float32)[None, :]

    state_row = slot * B + source
    mask = relayed[:, None] & inside[None, :]
    state = tl.load(hidden + state_row[:, None] * H + n[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.load(row_stats + state_row * 2, mask=relayed, other=0.0)
    rstd = tl.rsqrt(tl.load(row_stats + state_row * 2 + 1, mask=relayed, other=0.0) + eps)
    norm = (state - mean[:, None]) * rstd[:, None]
    norm = norm * tl.load(norm_weight + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    norm += tl.load(norm_bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    target = blocks + (request * B + row).to(tl.int64)[:, None] * H + n[None, :]
    embedding = tl.load(target, mask=mask, other=0.0)
    result = (embedding.to(tl.float32) + (beta * norm + gamma)).to(embedding.dtype)
    finite = tl.abs(result.to(tl.float32)) < float("inf")  # False for a NaN, too
    kept = relayed & (tl.min((finite | ~mask).to(tl.int32), axis=1) > 0)
    tl.store(target, result, mask=kept[:, None] & inside[None, :])

    if tl.program_id(1) == 0:
        member = first_request + tl.arange(0, REQUESTS)
        is_member = member < bs
        own_slot = tl.load(req_pool_indices + member, mask=is_member, other=0)
        first_position = tl.load(positions + member * B, mask=is_member, other=0)
        accepted = tl.load(accept_len + own_slot)
        ends_here = tl.load(next_prefix_len + own_slot) == first_position
        took = tl.sum(tl.reshape(kept.to(tl.int64), (REQUESTS, ROWS)), axis=1)
        refused = tl.sum(tl.reshape((relayed & ~kept).to(tl.int64), (REQUESTS, ROWS)), axis=1)
        tl.store(rounds + own_slot * 4, took, mask=is_member)
        tl.store(rounds + own_slot * 4 + 1, refused, mask=is_member)
        tl.store(rounds + own_slot * 4 + 2, tl.where(ends_here, accepted, EMPTY), mask=is_member)


def relay_apply(
    pool: RelayPool,
    relay: RelayModulation,
    activations: torch.Tensor,  # [bs, R, W] of `relay_gather`
    req_pool_indices: torch.Tensor,  # int64 [bs]; 0 in padded rows
    positions: torch.Tensor,  # int64 [bs, B]
    blocks: torch.Tensor,  # [bs, B, H], changed in place
) -> None:
    """Add the relay to `blocks`.

    In place: the host fills this buffer anew for every draft (`DFlashWorkerV2.forward_batch_generation`, and
    `DecodeCudaGraphRunner.load_batch` before a replay) and its first layer overwrites it as the residual anyway.

    Raises:
        ValueError: a tensor has another shape, dtype or layout than expected.
    """
    batch_size, block_size = positions.shape
    if batch_size == 0:
        return
    _, _, hidden_size = pool.hidden.shape
    linear, norm, rule, dtype = relay.relay_mlp[2], relay.relay_norm, pool.rule, pool.hidden.dtype
    num_rows, width = block_size - rule.first_row, linear.in_features
    assert pool.row_stats is not None
    expect("relay_apply", "activations", activations, (batch_size, num_rows, width), dtype)
    expect("relay_apply", "blocks", blocks, (batch_size, pool.block_size, hidden_size), dtype)
    tile = RowTile.of(batch_size, num_rows, blocks.element_size())
    dot = DotTile.of(tile, hidden_size, blocks.element_size())
    _relay_apply_kernel[(tile.tiles, triton.cdiv(hidden_size, dot.block_n))](
        blocks,
        activations,
        req_pool_indices,
        positions,
        pool.next_prefix_len,
        pool.accept_len,
        pool.enabled,
        pool.hidden,
        pool.row_stats,
        pool.rounds,
        linear.weight,
        linear.bias,
        norm.weight,
        norm.bias,
        batch_size,
        hidden_size,
        width,
        norm.eps,
        B=block_size,
        FIRST_ROW=rule.first_row,
        SHIFT=rule.shift,
        EMPTY=EMPTY,
        REQUESTS=tile.requests,
        ROWS=tile.rows,
        BLOCK_N=dot.block_n,
        BLOCK_K=dot.block_k,
        num_warps=dot.num_warps,
        num_stages=dot.num_stages,
    )
