"""KV pool in plain torch: the host's `MHATokenToKVPool` minus its Triton and CUDA kernels.

Buffers, addressing and layout stay the host's: per layer `k_buffer`, `v_buffer` of `[slots, Hkv, D]`, slot page 0 being
the padding page that absorbs writes nobody reads. Not supported: quantised caches.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, move_kv_cache_native


class TorchMHATokenToKVPool(MHATokenToKVPool):
    """`MHATokenToKVPool` whose writes and moves are torch operations."""

    def _init_kv_copy_and_warmup(self) -> None:
        # The host compiles and warms its tiled Triton copy here; `_move_kv_cache_impl` below needs none.
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        move_kv_cache_native(self.k_buffer, self.v_buffer, tgt_loc, src_loc)

    def _create_buffers(self) -> None:
        if self.is_quantized_kv_cache or self.store_dtype != self.dtype:
            raise ValueError(
                f"The dflow_cpu platform keeps the KV cache in the model's floating-point type, got {self.dtype} "
                f"stored as {self.store_dtype}. Remove --kv-cache-dtype."
            )
        super()._create_buffers()

    def _store_kv_layer(
        self,
        layer_idx: int,
        loc: torch.Tensor,  # [n] int64 slots
        cache_k: torch.Tensor,  # [n, Hkv, D]
        cache_v: torch.Tensor,  # [n, Hkv, D]
    ) -> None:
        self.k_buffer[layer_idx].index_copy_(0, loc, cache_k)
        self.v_buffer[layer_idx].index_copy_(0, loc, cache_v)

    def set_kv_buffer_prefix_valid(
        self,
        layer: Any,
        loc_2d: torch.Tensor,  # [bs, B] slots of a verified block
        commit_lens: torch.Tensor,  # [bs], rows of each block to keep
        cache_k: torch.Tensor,  # [bs * B, Hkv, D]
        cache_v: torch.Tensor,  # [bs * B, Hkv, D]
        k_scale: float | None = None,
        v_scale: float | None = None,
        layer_id_override: int | None = None,
    ) -> None:
        """Write the first `commit_lens[i]` rows of every block; the other rows go to the padding slot.

        A select by mask would give a shape that depends on data; redirecting keeps every shape static.
        """
        if loc_2d.ndim != 2 or commit_lens.shape != loc_2d.shape[:1] or cache_k.shape[0] != loc_2d.numel():
            raise ValueError(
                "expected loc_2d [bs, B], commit_lens [bs], cache_k [bs * B, ..], got "
                f"{tuple(loc_2d.shape)}, {tuple(commit_lens.shape)}, {tuple(cache_k.shape)}"
            )
        rows = torch.arange(loc_2d.shape[1], device=loc_2d.device)
        committed = rows < commit_lens.unsqueeze(1)  # [bs, B]
        loc = torch.where(committed, loc_2d, 0).reshape(-1).to(torch.int64)  # [bs * B]
        self.set_kv_buffer(
            layer,
            KVWriteLoc(loc, physical=True),
            cache_k,
            cache_v,
            k_scale,
            v_scale,
            layer_id_override=layer_id_override,
        )
