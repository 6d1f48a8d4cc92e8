"""From pool and positions to the hidden layer of the relay's MLP: rows found, embedded and multiplied in one launch.

    activation[r, i] = act(W_b E(b_r) + W_d E(d_r) + bias + W_h h[r, source(i)] [+ W_s E(s[r, source(i)])])

for every relayed row `i` of every request `r`; other rows of the result are not written. States are read from the pool
and embeddings from the table by index, so nothing is copied together first. Boundary terms are one line per request,
the weights are read once per row tile. Accumulates in float32 and rounds once, where the torch path rounds every term.

Reference: `RelayPool.read` and the first linear and activation of `RelayModulation`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_dflow.relay.kernels.tiles import (
    DTYPES,
    MIN_DOT_ROWS,
    DotTile,
    RowTile,
    activation_name,
    expect,
    relayed_lines,
)
from sglang_dflow.relay.modulation import RelayModulation
from sglang_dflow.relay.pool import RelayPool


class Embeddings(NamedTuple):
    """Where the token embeddings are read from.

    Attributes:
        rows: [V, H] the table, or [n, H] what an embedding made of `relay_tokens`.
        looked_up: True for the latter.
        scale: factor of every embedding that is read (already applied where `looked_up`).
    """

    rows: torch.Tensor
    looked_up: bool
    scale: float = 1.0


def gather_bytes(
    *, batch_size: int, num_rows: int, hidden_size: int, width: int, itemsize: int, stale_token: bool
) -> int:
    """Bytes that the launch has to move, weights once (more row tiles read them again, from the L2 cache)."""
    weights = width * (1 + (4 if stale_token else 3) * hidden_size)
    states = batch_size * num_rows * hidden_size * (2 if stale_token else 1)
    boundary = 2 * batch_size * hidden_size
    result = batch_size * num_rows * width
    return itemsize * (weights + states + boundary + result) + batch_size * 8 * (5 + num_rows)


def gather_operations(*, batch_size: int, num_rows: int, hidden_size: int, width: int, stale_token: bool) -> int:
    """Multiplications and additions: boundary terms per request, the rest per row."""
    return 2 * batch_size * width * hidden_size * (2 + num_rows * (2 if stale_token else 1))


@triton.jit
def _accumulate(acc, rows, row_mask, weights, weight_mask, H, scale, SCALED: tl.constexpr, BLOCK_K: tl.constexpr):
    """`acc + rows @ weights.T` over H features; `rows` [M] and `weights` [N] are pointers to a first feature."""
    feature = tl.arange(0, BLOCK_K)
    for start in range(0, H, BLOCK_K):
        k = start + feature
        x = tl.load(rows[:, None] + k[None, :], mask=row_mask[:, None] & (k < H)[None, :], other=0.0)
        w = tl.load(weights[None, :] + k[:, None], mask=weight_mask[None, :] & (k < H)[:, None], other=0.0)
        if SCALED:
            x = (x.to(tl.float32) * scale).to(x.dtype)  # the host rounds a scaled embedding to the table's dtype
        acc = tl.dot(x.to(w.dtype), w, acc, input_precision="ieee")
    return acc


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        x = tl.where(x < 0.0, 0.0, x)  # keeps a NaN, which a maximum would drop
    return x


@triton.jit(do_not_specialize=["bs"])
def _relay_gather_kernel(
    activations,  # [bs * R, W]
    req_pool_indices,  # [bs]
    positions,  # [bs, B]
    next_prefix_len,  # [num_rows]
    accept_len,  # [num_rows]
    enabled,  # [1]
    hidden,  # [num_rows, B, H]
    bonus,  # [num_rows]
    rejected,  # [num_rows]
    stale,  # [num_rows, B] or None
    embeddings,  # [V or n, H]
    weight,  # [W, 3H or 4H]
    bias,  # [W]
    bs,
    H,
    W,
    scale,
    B: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    SHIFT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LOOKED_UP: tl.constexpr,
    SCALED: tl.constexpr,
    REQUESTS: tl.constexpr,
    ROWS: tl.constexpr,
    BOUNDARY_LINES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    first_request = tl.program_id(0) * REQUESTS
    request, row, slot, source, relayed = relayed_lines(
        req_pool_indices, positions, next_prefix_len, accept_len, enabled, first_request, bs,
        B, FIRST_ROW, SHIFT, REQUESTS, ROWS,
    )  # fmt: skip
    if tl.max(relayed.to(tl.int32), axis=0) == 0:
        return
    line = request * (B - FIRST_ROW) + (row - FIRST_ROW)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    weights = weight + n.to(tl.int64) * ((3 if stale is None else 4) * H)

    # A product takes 16 lines at least: one in SPREAD carries a request, the others are zeros and fold away.
    SPREAD: tl.constexpr = BOUNDARY_LINES // REQUESTS
    spread = tl.arange(0, BOUNDARY_LINES)
    of_request = first_request + spread // SPREAD
    carries = (spread % SPREAD == 0) & (of_request < bs)
    if LOOKED_UP:
        bonus_row = of_request.to(tl.int64)
        rejected_row = bs + of_request.to(tl.int64)
    else:
        of_slot = tl.load(req_pool_indices + of_request, mask=carries, other=0)
        bonus_row = tl.load(bonus + of_slot)
        rejected_row = tl.load(rejected + of_slot)
    boundary = tl.zeros((BOUNDARY_LINES, BLOCK_N), dtype=tl.float32)
    boundary = _accumulate(boundary, embeddings + bonus_row * H, carries, weights, n < W, H, scale, SCALED, BLOCK_K)
    boundary = _accumulate(
        boundary, embeddings + rejected_row * H, carries, weights + H, n < W, H, scale, SCALED, BLOCK_K
    )
    boundary = tl.sum(tl.reshape(boundary, (REQUESTS, SPREAD, BLOCK_N)), axis=1)
    boundary += tl.load(bias + n, mask=n < W, other=0.0).to(tl.float32)[None, :]

    acc = tl.zeros((REQUESTS * ROWS, BLOCK_N), dtype=tl.float32)
    acc = _accumulate(acc, hidden + (slot * B + source) * H, relayed, weights + 2 * H, n < W, H, scale, False, BLOCK_K)
    if stale is not None:
        stale_row = (
            2 * bs + line.to(tl.int64) if LOOKED_UP else tl.load(stale + slot * B + source, mask=relayed, other=0)
        )
        acc = _accumulate(acc, embeddings + stale_row * H, relayed, weights + 3 * H, n < W, H, scale, SCALED, BLOCK_K)
    acc = tl.reshape(acc, (REQUESTS, ROWS, BLOCK_N)) + boundary[:, None, :]
    result = _activate(tl.reshape(acc, (REQUESTS * ROWS, BLOCK_N)), ACTIVATION)
    target = activations + line.to(tl.int64)[:, None] * W + n[None, :]
    tl.store(target, result.to(activations.dtype.element_ty), mask=relayed[:, None] & (n < W)[None, :])


def relay_gather(
    pool: RelayPool,
    relay: RelayModulation,
    embeddings: Embeddings,
    req_pool_indices: torch.Tensor,  # int64 [bs]; 0 in padded rows
    positions: torch.Tensor,  # int64 [bs, B]
) -> torch.Tensor:
    """Return the MLP's hidden layer [bs, R, W]; rows without relay are uninitialised.

    The one buffer of a draft: allocated here, so that under a CUDA graph it lives in the graph's own memory, which the
    drafter's layers use again, and no batch size has to be foreseen.

    Raises:
        ValueError: a tensor has another shape, dtype or layout than expected.
    """
    batch_size, block_size = positions.shape
    hidden_size = pool.hidden.shape[-1]
    linear, rule = relay.relay_mlp[0], pool.rule
    num_rows, width = block_size - rule.first_row, linear.out_features
    expect("relay_gather", "req_pool_indices", req_pool_indices, (batch_size,), torch.int64)
    expect("relay_gather", "positions", positions, (batch_size, pool.block_size), torch.int64)
    expect("relay_gather", "embeddings", embeddings.rows, (embeddings.rows.shape[0], hidden_size), *DTYPES)
    activations = torch.empty((batch_size, num_rows, width), dtype=pool.hidden.dtype, device=pool.hidden.device)
    if batch_size == 0:
        return activations
    tile = RowTile.of(batch_size, num_rows, pool.hidden.element_size())
    dot = DotTile.of(tile, width, pool.hidden.element_size())
    _relay_gather_kernel[(tile.tiles, triton.cdiv(width, dot.block_n))](
        activations,
        req_pool_indices,
        positions,
        pool.next_prefix_len,
        pool.accept_len,
        pool.enabled,
        pool.hidden,
        pool.bonus,
        pool.rejected,
        pool.stale,
        embeddings.rows,
        linear.weight,
        linear.bias,
        batch_size,
        hidden_size,
        width,
        embeddings.scale,
        B=block_size,
        FIRST_ROW=rule.first_row,
        SHIFT=rule.shift,
        ACTIVATION=activation_name(relay),
        LOOKED_UP=embeddings.looked_up,
        SCALED=embeddings.scale != 1.0,
        REQUESTS=tile.requests,
        ROWS=tile.rows,
        BOUNDARY_LINES=MIN_DOT_ROWS,
        BLOCK_N=dot.block_n,
        BLOCK_K=dot.block_k,
        num_warps=dot.num_warps,
        num_stages=dot.num_stages,
    )
    return activations
