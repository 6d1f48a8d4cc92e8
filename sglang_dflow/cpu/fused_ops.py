"""Torch forwards of the host's small per-layer operators, with fewer dispatches than its native ones.

At one row every operator costs its dispatch, not its arithmetic: a decode step of SmolLM2 runs 61 norms and 30 rotary
embeddings. Registered through the host's official seam for out-of-tree platforms, `BaseFusedOp.register_oot_forward`;
anything out of the ordinary goes to the operator's own `forward_native`. Arithmetic is fp32 throughout, as on CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

from sglang_dflow.cpu import PLATFORM_NAME


def register_fused_ops() -> None:
    """Register the forwards below for this platform's dispatch key; idempotent."""
    BaseFusedOp.register_oot_forward(RMSNorm, rms_norm_forward, PLATFORM_NAME)
    BaseFusedOp.register_oot_forward(RotaryEmbedding, rotary_forward, PLATFORM_NAME)


def rms_norm_forward(
    self: Any,
    x: torch.Tensor,  # [.., H]
    residual: torch.Tensor | None = None,  # [.., H]
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: torch.nn.Module | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`RMSNorm`: normalise `x + residual` and return it with that sum, rounded once to the activation type."""
    ordinary = (
        post_residual_addition is None
        and self.variance_size_override is None
        and not self.cast_x_before_out_mul
        and not self.fp32_residual
        and self.override_orig_dtype is None
    )
    if not ordinary:
        return self.forward_native(x, residual, post_residual_addition, quant_linear)
    dtype = x.dtype
    total = x.float() if residual is None else x.float() + residual
    normed = F.rms_norm(total, (self.hidden_size,), self.weight.float(), self.variance_epsilon).to(dtype)
    return normed if residual is None else (normed, total.to(dtype))


def rotary_forward(
    self: Any,
    positions: torch.Tensor,  # [n]
    query: torch.Tensor,  # [n, Hq * D]
    key: torch.Tensor,  # [n, Hkv * D]
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`RotaryEmbedding`, neox style over the whole head: `x * cos + roll(x) * signed_sin` for q and k at once."""
    if not self.is_neox_style or self.rotary_dim != self.head_size or offsets is not None:
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    head = self.head_size
    rows = positions.numel()
    heads = torch.cat([query.reshape(rows, -1, head), key.reshape(rows, -1, head)], dim=1)  # [n, Hq + Hkv, D]
    cos, sin = F.embedding(positions.flatten(), _rotary_table(self)).view(rows, 2, 1, head).unbind(1)
    wide = heads.float()
    turned = torch.addcmul(wide * cos, wide.roll(head // 2, -1), sin).to(heads.dtype)
    num_q = query.numel() // (rows * head) if rows else 0
    return turned[:, :num_q].reshape(query.shape), turned[:, num_q:].reshape(key.shape)


def _rotary_table(self: Any) -> torch.Tensor:
    """Return `[positions, 2 * D]` fp32: `cos | cos` beside `-sin | sin`, rebuilt when the host replaces its cache."""
    source = self.cos_sin_cache  # [positions, D]: cos | sin
    memo = self.__dict__.get("_dflow_rotary_table")
    if memo is None or memo[0] is not source:
        cos, sin = source.float().chunk(2, dim=-1)
        memo = (source, torch.cat([cos, cos, -sin, sin], dim=-1).contiguous())
        self.__dict__["_dflow_rotary_table"] = memo
    return memo[1]
