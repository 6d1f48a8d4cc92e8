"""What the draft-side kernels share: how rows are tiled, which pool row serves which of them, and what is supported.

A tile holds `REQUESTS` whole requests of `ROWS` rows each, `ROWS` the power of two at or above `R`: the boundary terms
are then per request inside a tile, and request and row of a tile line are shifts and masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_dflow.relay.modulation import ACTIVATIONS, RelayModulation
from sglang_dflow.relay.pool import RelayPool

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ACTIVATION_NAMES = ("silu", "gelu", "relu")

MIN_DOT_ROWS = 16
"""Fewest rows that `tl.dot` takes."""

_PROGRAMS = 256
"""Programs wanted of a launch: two for each of the 108 (A100) or 132 (H100) multiprocessors."""


class RowTile(NamedTuple):
    """Tile lines of the draft side.

    Attributes:
        requests: requests of a tile, 16 at most (a power of two).
        rows: lines of one request, `R` rounded up to a power of two.
        tiles: tiles of the batch.
    """

    requests: int
    rows: int
    tiles: int

    @classmethod
    def of(cls, batch_size: int, num_rows: int, itemsize: int) -> RowTile:
        """Return the tiles of `batch_size` requests with `num_rows` (`R`) rows each.

        16 lines if they hold everything, else 64; 16 in float32, which has no tensor cores here: 64 spilled registers.
        """
        rows = triton.next_power_of_2(num_rows)
        lines = 16 if batch_size * rows <= 16 or itemsize == 4 else 64
        requests = min(MIN_DOT_ROWS, max(1, lines // rows))
        return cls(requests=requests, rows=rows, tiles=triton.cdiv(batch_size, requests))


class DotTile(NamedTuple):
    """Constants of a product's launch, chosen by shape alone: a captured graph never tunes."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, tile: RowTile, features: int, itemsize: int) -> DotTile:
        """Return the widest feature tile that still gives every multiprocessor two programs."""
        wide = (64, 32) if itemsize == 2 else (32,)
        block_n = next((n for n in wide if tile.tiles * triton.cdiv(features, n) >= _PROGRAMS), 16)
        block_k = (128 if tile.requests * tile.rows == 16 else 64) * 2 // itemsize
        return cls(block_n=block_n, block_k=block_k, num_warps=4, num_stages=4)


@triton.jit
def relayed_lines(
    req_pool_indices,  # [bs]
    positions,  # [bs, B]
    next_prefix_len,  # [num_rows]
    accept_len,  # [num_rows]
    enabled,  # [1]
    first_request,
    bs,
    B: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    SHIFT: tl.constexpr,
    REQUESTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """`alignment.relay_rows` for the lines of one tile: request, block row, pool row, source row and mask.

    The source row is out of range where the mask is False: no `tl.where` here, it would not compile in triton 3.6.
    """
    line = tl.arange(0, REQUESTS * ROWS)
    request = first_request + line // ROWS
    row = FIRST_ROW + line % ROWS
    inside = (request < bs) & (row < B)
    slot = tl.load(req_pool_indices + request, mask=request < bs, other=0)
    position = tl.load(positions + request * B + row, mask=inside, other=0)
    prefix = tl.load(next_prefix_len + slot)
    offset = position - prefix
    source = offset + tl.load(accept_len + slot) + SHIFT
    relayed = inside & (prefix >= 0) & (offset >= FIRST_ROW) & (source < B) & (tl.load(enabled) != 0)
    return request, row, slot, source, relayed


def expect(kernel: str, name: str, tensor: torch.Tensor, shape: Sequence[int], *dtypes: torch.dtype) -> None:
    """Raise ValueError unless `tensor` is contiguous and has this shape and one of these dtypes (any if none)."""
    fits = tuple(tensor.shape) == tuple(shape) and (not dtypes or tensor.dtype in dtypes)
    if not fits or not tensor.is_contiguous():
        found = f"{tensor.dtype} {tuple(tensor.shape)}, {'' if tensor.is_contiguous() else 'not '}contiguous"
        wanted = " or ".join(map(str, dtypes)) or "any dtype"
        raise ValueError(f"{kernel}: {name} is {found}; expected {wanted} {tuple(shape)}, contiguous")


def activation_name(relay: RelayModulation) -> str:
    """Return the key in `modulation.ACTIVATIONS` of the MLP's activation."""
    return next(name for name, kind in ACTIVATIONS.items() if type(relay.relay_mlp[1]) is kind)


def check_supported(pool: RelayPool, relay: RelayModulation) -> None:
    """Refuse what the kernels cannot serve, once, before the first draft.

    Raises:
        ValueError: all problems in one message.
    """
    problems = []
    parameters = [*relay.relay_norm.parameters(), *relay.relay_mlp.parameters()]  # a rescorer has no kernel
    dtypes = sorted({str(parameter.dtype) for parameter in parameters} | {str(pool.hidden.dtype)})
    if len(dtypes) > 1 or pool.hidden.dtype not in DTYPES:
        problems.append(f"pool and relay weights are {', '.join(dtypes)}, expected one of bfloat16, float16, float32")
    if activation_name(relay) not in ACTIVATION_NAMES:
        problems.append(f"relay_activation is {activation_name(relay)}, expected one of {ACTIVATION_NAMES}")
    if not all(parameter.is_contiguous() for parameter in parameters):
        problems.append("a relay weight is not contiguous; load the checkpoint without a layout change")
    if relay.hidden_size != pool.hidden.shape[-1] or relay.stale_token != (pool.stale is not None):
        problems.append("pool and relay are of two checkpoints: hidden size or stale token differ")
    if problems:
        raise ValueError("the relay's GPU kernels cannot serve this drafter: " + "; ".join(problems))
