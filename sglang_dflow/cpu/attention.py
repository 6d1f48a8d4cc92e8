"""Attention in plain torch for every forward mode that the host's scheduler and the DFLASH family use.

One plan per forward (`AttentionPlan`): which slots to read and where the queries stand, built once in
`init_forward_metadata` and shared by all layers. Two layouts:

- *padded* (decode, target verify, draft block; every request has the same number of queries): one gather and one
  attention call per layer for the whole batch, KV padded to the longest request and masked;
- *ragged* (extend, chunked prefill, mixed): one gather per layer, one attention call per request and layer.

Symbols: `N` query rows, `bs` requests, `Q` queries per request, `S` longest KV length, `Hq`/`Hkv` heads,
`G = Hq / Hkv`, `D` head dim. Grouped queries are folded into the query axis (`[Hkv, G * Q]` against `[Hkv, S]`), so
K and V are never repeated. `scaled_dot_product_attention` accumulates its softmax in fp32 for every input type.

Relies on SGLang 0.5.23: `AttentionBackend`, `KVWriteLoc.for_layer`, `ForwardBatch` lengths (a verify's `seq_lens`
exclude its block). Refused with an error: cross attention, logit capping, attention sinks, hybrid sliding-window pools.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_context import get_attn_backend

from sglang_dflow.cpu import PLATFORM_NAME
from sglang_dflow.cpu.graph_capture import is_capturing

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

NO_WINDOW = -1


@dataclass(frozen=True)
class Segment:
    """One request's share of a ragged forward, all counts in tokens."""

    q_start: int
    q_len: int
    kv_start: int
    kv_len: int

    @property
    def q_rows(self) -> slice:
        return slice(self.q_start, self.q_start + self.q_len)

    @property
    def kv_rows(self) -> slice:
        return slice(self.kv_start, self.kv_start + self.kv_len)


@dataclass
class AttentionPlan:
    """What all layers of one forward share. Lives until the next `init_forward_metadata`."""

    kv_slots: torch.Tensor  # [bs * S] (padded) or [sum of kv_len] (ragged), int64
    q_lens: list[int]  # [bs]
    kv_lens: list[int]  # [bs], the queries' own tokens included
    padded: bool
    segments: list[Segment]  # empty when padded
    # Masks by (causal, window, folded group size, request or -1), built at the first layer that asks.
    masks: dict[tuple[bool, int, int, int], torch.Tensor | None] = field(default_factory=dict)

    @property
    def max_kv_len(self) -> int:
        return max(self.kv_lens)


def build_plan(
    req_to_token: torch.Tensor,  # [pool rows, L] int32
    req_pool_indices: torch.Tensor,  # [bs]
    q_lens: list[int],
    kv_lens: list[int],
) -> AttentionPlan:
    """Gather the slots that each request reads, and choose the layout."""
    if len(set(q_lens)) == 1 and _padding_is_cheap(q_lens[0], kv_lens):
        slots = req_to_token[req_pool_indices, : max(kv_lens)]  # [bs, S]
        if len(set(kv_lens)) > 1:
            # Columns past a request's length hold stale slots of earlier requests: read the padding slot instead.
            columns = torch.arange(slots.shape[1])
            slots = torch.where(columns < torch.tensor(kv_lens).unsqueeze(1), slots, 0)
        return AttentionPlan(slots.reshape(-1).to(torch.int64), q_lens, kv_lens, True, [])
    rows = req_pool_indices.tolist()
    slots = torch.cat([req_to_token[row, :length] for row, length in zip(rows, kv_lens, strict=True)])
    segments, q_start, kv_start = [], 0, 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        segments.append(Segment(q_start, q_len, kv_start, kv_len))
        q_start, kv_start = q_start + q_len, kv_start + kv_len
    return AttentionPlan(slots.to(torch.int64), q_lens, kv_lens, False, segments)


def _padding_is_cheap(q_len: int, kv_lens: list[int]) -> bool:
    """Whether one padded call beats one call per request.

    Folding queries and masking cost `G * Q * S` per head, which long prefill chunks should not pay; and padding to one
    very long request should not multiply the work of many short ones.
    """
    return q_len <= 32 and (len(kv_lens) == 1 or max(kv_lens) * len(kv_lens) <= 2 * sum(kv_lens) + 4096)


def visibility_mask(
    q_lens: list[int],
    kv_lens: list[int],
    *,
    causal: bool,
    window: int,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Return the additive mask `[bs, Q, S]` of a padded batch, or None when every query sees every key.

    Query `i` of a request stands at position `kv_len - q_len + i`. It sees key `j` when `j < kv_len`, and
    `j <= position` if causal, and `j >= position - window` if a window is set (the host's convention: `window` keys
    before its own).
    """
    bs, q_len, max_kv = len(q_lens), q_lens[0], max(kv_lens)
    ragged = len(set(kv_lens)) > 1
    if not ragged and window == NO_WINDOW and (not causal or q_len == 1):
        return None
    lens = torch.tensor(kv_lens).view(bs, 1, 1)
    keys = torch.arange(max_kv).view(1, 1, max_kv)
    position = lens - q_len + torch.arange(q_len).view(1, q_len, 1)  # [bs, Q, 1]
    visible = keys < lens
    if causal:
        visible = visible & (keys <= position)
    if window != NO_WINDOW:
        visible = visible & (keys >= position - window)
    visible = visible.expand(bs, q_len, max_kv)
    return torch.zeros(bs, q_len, max_kv, dtype=dtype).masked_fill_(~visible, float("-inf"))


class TorchAttentionBackend(AttentionBackend):
    """The `dflow_cpu` attention backend, for target and draft runners alike."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        # Captured at construction: the host deletes these fields from the batch later.
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.forward_metadata: AttentionPlan | None = None
        self._layers: dict[int, RadixAttention] = {}  # those that a captured graph calls
        if getattr(model_runner, "is_hybrid_swa", False):
            raise NotImplementedError(
                "The dflow_cpu platform has no hybrid sliding-window KV pool. "
                "Pass --disable-hybrid-swa-memory to keep one full-size pool for all layers."
            )

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Build the plan of one forward; the only place that reads lengths on the host."""
        mode = forward_batch.forward_mode
        if mode.is_idle() or forward_batch.batch_size == 0:
            self.forward_metadata = None
            return
        seq_lens = forward_batch.seq_lens.tolist()
        if mode.is_decode():
            q_lens = [1] * len(seq_lens)
        elif mode.is_target_verify():
            block = int(forward_batch.spec_info.draft_token_num)
            q_lens = [block] * len(seq_lens)
            seq_lens = [length + block for length in seq_lens]
        else:
            q_lens = forward_batch.extend_seq_lens.tolist()
        self.forward_metadata = build_plan(
            self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices, q_lens, seq_lens
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return False

    def forward_decode(
        self,
        q: torch.Tensor,  # [N, Hq * D]
        k: torch.Tensor | None,  # [N, Hkv, D]
        v: torch.Tensor | None,  # [N, Hkv, D]
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_extend(
        self,
        q: torch.Tensor,  # [N, Hq * D]
        k: torch.Tensor | None,  # [N, Hkv, D]
        v: torch.Tensor | None,  # [N, Hkv, D]
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        extras: dict[str, Any],
    ) -> torch.Tensor:  # [N, Hq * Dv]
        _refuse_unsupported(layer, extras)
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc.for_layer(forward_batch, layer), k, v)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)  # [N, Hq, D]
        if is_capturing():
            self._layers[layer.layer_id] = layer
            out = torch.ops.sglang_dflow.attend_by_plan(query, layer.layer_id)
        else:
            out = self.attend_by_plan(query, layer)
        return out.reshape(q.shape[0], -1)

    def attend_by_plan(self, query: torch.Tensor, layer: RadixAttention) -> torch.Tensor:  # [N, Hq, D] -> [N, Hq, Dv]
        """Attend over what the current plan names; the queries' own keys and values are in the pool already."""
        plan = self.forward_metadata
        if plan is None:
            raise RuntimeError(
                "attention ran without a plan: init_forward_metadata was not called for this non-idle batch"
            )
        pool = self.token_to_kv_pool
        keys = _gather(pool.get_key_buffer(layer.layer_id), plan.kv_slots)
        values = _gather(pool.get_value_buffer(layer.layer_id), plan.kv_slots)
        attend = padded_attention if plan.padded else ragged_attention
        causal = layer.attn_type == AttentionType.DECODER
        return attend(query, keys, values, plan, causal=causal, window=_window(layer), scale=layer.scaling)


# In a captured graph attention is one operation that reads its lengths from a plan made before the replay, as a GPU
# backend reads them from its metadata buffers.
_LIBRARY = torch.library.Library("sglang_dflow", "DEF")
_LIBRARY.define("attend_by_plan(Tensor query, int layer_id) -> Tensor")


@torch.library.impl(_LIBRARY, "attend_by_plan", "CompositeExplicitAutograd")
def _attend_by_plan(query: torch.Tensor, layer_id: int) -> torch.Tensor:
    backend: TorchAttentionBackend = get_attn_backend()
    return backend.attend_by_plan(query, backend._layers[layer_id])


@register_attention_backend(PLATFORM_NAME)
def create_torch_attention_backend(runner: ModelRunner) -> TorchAttentionBackend:
    """Factory under which the host finds the backend by name; registered by importing this module."""
    if runner.use_mla_backend:
        raise NotImplementedError(
            "The dflow_cpu platform has no multi-head latent attention. Serve this model on a GPU."
        )
    return TorchAttentionBackend(runner)


def _gather(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return rows of a KV buffer `[slots, Hkv, D]` as `[n, Hkv, D]`.

    `F.embedding` copies whole rows; `index_select` on a 3-D tensor is ten times slower from about 4,000 rows on
    (measured: 4,800 rows x 192 floats, 0.5 ms against 5.3 ms, torch 2.14.1, one thread).
    """
    return F.embedding(slots, buffer.flatten(1)).view(-1, *buffer.shape[1:])


def padded_attention(
    query: torch.Tensor,  # [bs * Q, Hq, D]
    keys: torch.Tensor,  # [bs * S, Hkv, D]
    values: torch.Tensor,  # [bs * S, Hkv, Dv]
    plan: AttentionPlan,
    *,
    causal: bool,
    window: int,
    scale: float,
) -> torch.Tensor:  # [bs * Q, Hq, Dv]
    """Attend with the same number of queries per request, in one call."""
    bs, q_len, max_kv = len(plan.q_lens), plan.q_lens[0], plan.max_kv_len
    num_kv_heads = keys.shape[1]
    group = query.shape[1] // num_kv_heads
    folded = query.view(bs, q_len, num_kv_heads, group, -1).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(bs, num_kv_heads, group * q_len, -1)  # [bs, Hkv, G * Q, D]
    out = F.scaled_dot_product_attention(
        folded,
        keys.view(bs, max_kv, num_kv_heads, -1).transpose(1, 2),  # [bs, Hkv, S, D]
        values.view(bs, max_kv, num_kv_heads, -1).transpose(1, 2),
        attn_mask=_folded_mask(plan, causal, window, group, query.dtype),
        scale=scale,
    )
    out = out.view(bs, num_kv_heads, group, q_len, -1).permute(0, 3, 1, 2, 4)  # [bs, Q, Hkv, G, Dv]
    return out.reshape(bs * q_len, num_kv_heads * group, -1)


def _folded_mask(plan: AttentionPlan, causal: bool, window: int, group: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the mask `[bs, 1, G * Q, S]` of a padded plan, cached for the layers that share it."""
    key = (causal, window, group, -1)
    if key not in plan.masks:
        mask = visibility_mask(plan.q_lens, plan.kv_lens, causal=causal, window=window, dtype=dtype)
        plan.masks[key] = None if mask is None else mask.repeat(1, group, 1).unsqueeze(1)
    return plan.masks[key]


def ragged_attention(
    query: torch.Tensor,  # [N, Hq, D]
    keys: torch.Tensor,  # [sum of kv_len, Hkv, D]
    values: torch.Tensor,  # [sum of kv_len, Hkv, Dv]
    plan: AttentionPlan,
    *,
    causal: bool,
    window: int,
    scale: float,
) -> torch.Tensor:  # [N, Hq, Dv]
    """Attend with different numbers of queries per request, one call each."""
    out = query.new_empty(query.shape[0], query.shape[1], values.shape[2])
    for index, segment in enumerate(plan.segments):
        if segment.q_len == 0:
            continue
        # Without a cached prefix plain causal attention needs no mask, and the kernel skips the upper triangle.
        triangular = causal and window == NO_WINDOW and segment.q_len == segment.kv_len
        mask = None if triangular else _segment_mask(plan, index, causal, window, query.dtype)
        attended = F.scaled_dot_product_attention(
            query[segment.q_rows].transpose(0, 1).unsqueeze(0),  # [1, Hq, q_len, D]
            keys[segment.kv_rows].transpose(0, 1).unsqueeze(0),  # [1, Hkv, kv_len, D]
            values[segment.kv_rows].transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            is_causal=triangular and segment.q_len > 1,
            scale=scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        out[segment.q_rows] = attended.squeeze(0).transpose(0, 1)
    return out


def _segment_mask(
    plan: AttentionPlan, index: int, causal: bool, window: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return the mask `[1, 1, q_len, kv_len]` of one ragged request, cached for the layers that share it."""
    key = (causal, window, 1, index)
    if key not in plan.masks:
        segment = plan.segments[index]
        mask = visibility_mask([segment.q_len], [segment.kv_len], causal=causal, window=window, dtype=dtype)
        plan.masks[key] = None if mask is None else mask.unsqueeze(1)
    return plan.masks[key]


def _window(layer: RadixAttention) -> int:
    size = layer.sliding_window_size
    return NO_WINDOW if size is None or size < 0 else int(size)


def _refuse_unsupported(layer: RadixAttention, extras: dict[str, Any]) -> None:
    """Raise for anything whose silent omission would change the model's output."""
    problems = []
    if layer.is_cross_attention:
        problems.append("cross attention")
    if layer.logit_cap:
        problems.append(f"logit capping ({layer.logit_cap})")
    if layer.attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
        problems.append(f"attention type {layer.attn_type}")
    problems += [f"argument {name!r}" for name, value in extras.items() if value is not None]
    if problems:
        raise NotImplementedError(
            f"The dflow_cpu attention backend does not support {', '.join(problems)} (layer {layer.layer_id}). "
            "Serve this model on a GPU."
        )
