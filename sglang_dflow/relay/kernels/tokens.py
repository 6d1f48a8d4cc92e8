"""Token ids that a draft's relay reads, where the embedding is not a plain table on this device: one launch.

    ids = [bonus of every request; rejected of every request; stale token of every relayable row]

Vocabulary-parallel and wrapped embeddings are a function with a collective inside; the ids go through it once, and
`relay_gather` reads its result instead of a table. Reference: the concatenation in `draft_input.relayed_input`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflow.relay.kernels.tiles import expect, relayed_lines
from sglang_dflow.relay.pool import RelayPool


def tokens_bytes(*, batch_size: int, num_rows: int, stale_token: bool) -> int:
    """Bytes that the launch moves: `num_rows` (`R`) rows a request."""
    return batch_size * (3 * 8 + 2 * 16 + (num_rows * 24 if stale_token else 0))


@triton.jit(do_not_specialize=["bs"])
def _relay_tokens_kernel(
    ids,  # [bs * (2 + R)] or [bs * 2]
    req_pool_indices,  # [bs]
    positions,  # [bs, B]
    next_prefix_len,  # [num_rows]
    accept_len,  # [num_rows]
    enabled,  # [1]
    bonus,  # [num_rows]
    rejected,  # [num_rows]
    stale,  # [num_rows, B] or None
    bs,
    B: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
):
    request = tl.program_id(0)
    own_slot = tl.load(req_pool_indices + request)
    tl.store(ids + request, tl.load(bonus + own_slot))
    tl.store(ids + bs + request, tl.load(rejected + own_slot))
    if stale is not None:
        _, row, slot, source, relayed = relayed_lines(
            req_pool_indices, positions, next_prefix_len, accept_len, enabled, request, bs, B, FIRST_ROW, SHIFT, 1, ROWS
        )
        tokens = tl.load(stale + slot * B + source, mask=relayed, other=0)  # any valid id where none is used
        line = 2 * bs + request * (B - FIRST_ROW) + (row - FIRST_ROW)
        tl.store(ids + line, tokens, mask=row < B)


def relay_tokens(
    pool: RelayPool,
    req_pool_indices: torch.Tensor,  # int64 [bs]; 0 in padded rows
    positions: torch.Tensor,  # int64 [bs, B]
) -> torch.Tensor:
    """Return the ids, int64 [bs * 2] or, with stale tokens, [bs * (2 + R)], in the order that `relay_gather` reads."""
    batch_size, block_size = positions.shape
    rule = pool.rule
    num_rows = block_size - rule.first_row
    expect("relay_tokens", "req_pool_indices", req_pool_indices, (batch_size,), torch.int64)
    expect("relay_tokens", "positions", positions, (batch_size, pool.block_size), torch.int64)
    count = batch_size * (2 if pool.stale is None else 2 + num_rows)
    ids = torch.empty(count, dtype=torch.int64, device=positions.device)
    if batch_size == 0:
        return ids
    _relay_tokens_kernel[(batch_size,)](
        ids,
        req_pool_indices,
        positions,
        pool.next_prefix_len,
        pool.accept_len,
        pool.enabled,
        pool.bonus,
        pool.rejected,
        pool.stale,
        batch_size,
        B=block_size,
        FIRST_ROW=rule.first_row,
        SHIFT=rule.shift,
        ROWS=triton.next_power_of_2(num_rows),
        num_warps=1,
    )
    return ids
