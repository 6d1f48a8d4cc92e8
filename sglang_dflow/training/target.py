"""The frozen target of training, in plain torch: one decoder stack, any attention pattern.

Owns the target's weights (read through ``transformers``, q/k/v and gate/up fused) and the captured states. What a
row may attend to is the caller's business: generation, capture, packed verification and evaluation each pass an
``attend`` function and share the rest.

Captured states follow the host: for ``target_layer_ids = [i, ..]`` SGLang 0.5.23 (``set_dflash_layers_to_capture``)
captures the residual stream that enters layer ``i + 1``, i.e. the output of layer ``i`` before any norm, which is
``hidden_states[i + 1]`` of transformers. ``i`` must therefore be below the last layer.

Limits: Llama-shaped targets (RMSNorm, rotary, grouped-query attention, gated SiLU MLP, no biases), default rotary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

# attend(layer, q [.., T, Hq, D], k [.., T, Hkv, D], v [.., T, Hkv, D]) -> [.., T, Hq * D]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class TargetShape(NamedTuple):
    """Sizes of a decoder stack, in the words of its config."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int


class LayerWeights(NamedTuple):
    """One layer's frozen weights."""

    input_norm: torch.Tensor  # [H]
    qkv: torch.Tensor  # [(Hq + 2 Hkv) D, H]
    out: torch.Tensor  # [H, Hq D]
    post_norm: torch.Tensor  # [H]
    gate_up: torch.Tensor  # [2 I, H]
    down: torch.Tensor  # [H, I]


class TargetOutput(NamedTuple):
    """Result of one pass over some rows."""

    hidden: torch.Tensor  # [.., T, H] after the final norm: times the head it gives the logits
    captured: torch.Tensor | None  # [.., T, m * H] captured states, layers side by side; None without capture


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, statistics in float32, result in the input's type."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rope_table(length: int, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine tables [length, D] of the half-split ("neox") rotary embedding."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)  # [D / 2]
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)  # [length, D / 2]
    angle = torch.cat([angle, angle], dim=-1)  # [length, D]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``x`` [.., T, heads, D] by tables [.., T, D]."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)


class Target:
    """The frozen target: ``embed``, ``forward`` with the caller's attention, ``logits``."""

    def __init__(
        self,
        shape: TargetShape,
        embedding: torch.Tensor,  # [V, H]
        head: torch.Tensor,  # [V, H]
        layers: list[LayerWeights],
        final_norm: torch.Tensor,  # [H]
        target_layer_ids: Sequence[int] = (),
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        bad = [i for i in target_layer_ids if not 0 <= i < shape.num_layers - 1]
        if bad:
            raise ValueError(
                f"target_layer_ids {bad} cannot be captured: the target has {shape.num_layers} layers and the host "
                f"captures the input of layer i + 1; expected ids in 0..{shape.num_layers - 2}."
            )
        self.shape = shape
        self.embedding = embedding
        self.head = head
        self.layers = layers
        self.final_norm = final_norm
        self.target_layer_ids = list(target_layer_ids)
        self.eos_token_ids = list(eos_token_ids)
        self.cos, self.sin = rope_table(
            min(shape.max_position_embeddings, 8192), shape.head_dim, shape.rope_theta, embedding.dtype
        )  # [positions, D] each

    @classmethod
    def load(cls, path: str | Path, dtype: torch.dtype, target_layer_ids: Sequence[int] = ()) -> Target:
        """Read a transformers checkpoint directory."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype)
        return cls.from_transformers(model, target_layer_ids)

    @classmethod
    def from_transformers(cls, model: torch.nn.Module, target_layer_ids: Sequence[int] = ()) -> Target:
        """Fuse the weights of a ``LlamaForCausalLM``-shaped model."""
        config, decoder = model.config, model.model
        shape = TargetShape(
            config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads,
            config.num_key_value_heads, config.head_dim, config.vocab_size, config.rms_norm_eps,
            float(config.rope_parameters["rope_theta"]), config.max_position_embeddings,
        )  # fmt: skip
        layers = []
        for layer in decoder.layers:
            attention, mlp = layer.self_attn, layer.mlp
            if attention.q_proj.bias is not None or hasattr(attention, "q_norm"):
                raise ValueError(
                    f"{type(model).__name__} has attention biases or q/k norms; this target runner expects a Llama-"
                    "shaped model without them."
                )
            qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
            gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            weights = LayerWeights(
                layer.input_layernorm.weight, qkv, attention.o_proj.weight,
                layer.post_attention_layernorm.weight, gate_up, mlp.down_proj.weight,
            )  # fmt: skip
            layers.append(LayerWeights(*(tensor.detach().contiguous() for tensor in weights)))
        eos = model.generation_config.eos_token_id
        eos_ids = [] if eos is None else list(eos) if isinstance(eos, list | tuple) else [int(eos)]
        return cls(
            shape,
            decoder.embed_tokens.weight.detach(),
            model.lm_head.weight.detach(),
            layers,
            decoder.norm.weight.detach(),
            target_layer_ids,
            eos_ids,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and activations."""
        return self.embedding.dtype

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token embeddings: ids [..] -> [.., H]."""
        return F.embedding(ids, self.embedding)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the vocabulary: [.., H] -> [.., V]."""
        return F.linear(hidden, self.head)

    def forward(
        self,
        ids: torch.Tensor,  # [.., T]
        positions: torch.Tensor,  # [.., T] absolute
        attend: Attend,
        capture: bool = False,
    ) -> TargetOutput:
        """Run the stack over the given rows; ``attend`` decides what each row sees."""
        shape = self.shape
        x = self.embed(ids)  # [.., T, H]
        cos, sin = self.cos[positions], self.sin[positions]  # [.., T, D]
        kept: list[torch.Tensor] = []
        for index, layer in enumerate(self.layers):
            fused = F.linear(rms_norm(x, layer.input_norm, shape.rms_norm_eps), layer.qkv)
            heads = fused.unflatten(-1, (-1, shape.head_dim))  # [.., T, Hq + 2 Hkv, D]
            rotated = apply_rope(heads[..., : shape.num_heads + shape.num_kv_heads, :], cos, sin)
            q, k = rotated.split([shape.num_heads, shape.num_kv_heads], dim=-2)
            v = heads[..., shape.num_heads + shape.num_kv_heads :, :]
            x = x + F.linear(attend(index, q, k, v), layer.out)
            fused = F.linear(rms_norm(x, layer.post_norm, shape.rms_norm_eps), layer.gate_up)
            gate, up = fused.chunk(2, dim=-1)  # [.., T, I] each
            x = x + F.linear(F.silu(gate) * up, layer.down)
            if capture and index in self.target_layer_ids:
                kept.append(x)
        # In the order of target_layer_ids, which is the order of fc's input columns.
        ordered = sorted(self.target_layer_ids)
        captured = torch.cat([kept[ordered.index(i)] for i in self.target_layer_ids], dim=-1) if kept else None
        return TargetOutput(rms_norm(x, self.final_norm, shape.rms_norm_eps), captured)


def causal_attend(shape: TargetShape, left_pad: torch.Tensor | None = None) -> Attend:
    """Causal attention within a batch of rows [B, T]; ``left_pad`` [B] rows at the start of each are hidden."""

    def attend(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = shape.num_heads // shape.num_kv_heads
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, heads, T, D]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        if left_pad is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            rows = torch.arange(q.shape[2])
            # The diagonal stays open so that padded rows have something to average: no NaN.
            visible = (rows[None, None, :] >= left_pad[:, None, None]) & (rows[None, :, None] >= rows[None, None, :])
            visible = visible | torch.eye(q.shape[2], dtype=torch.bool)  # [B, T, T]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None])
        return out.transpose(1, 2).flatten(-2)  # [B, T, Hq D]

    return attend
