"""The frozen target of training, in plain torch: one decoder stack, any attention pattern.

Owns the target's weights (read through ``transformers``, q/k/v and gate/up fused) and the captured states. What a
row may attend to is the caller's business: generation, capture, packed verification and evaluation each pass an
``attend`` function and share the rest.

Captured states follow the host: for ``target_layer_ids = [i, ..]`` SGLang 0.5.23 (``set_dflash_layers_to_capture``)
captures the residual stream that enters layer ``i + 1``, i.e. the output of layer ``i`` before any norm, which is
``hidden_states[i + 1]`` of transformers. ``i`` must therefore be below the last layer.

Supported: ``llama``, ``mistral``, ``qwen2`` (q/k/v biases) and ``qwen3`` (q/k norms), tied or untied head, every rotary
scaling whose frequencies do not depend on the length (default, linear, llama3, yarn). Anything else is refused by name.
Everything runs where the weights are; callers pass ids and positions on that device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

# attend(layer, q [.., T, Hq, D], k [.., T, Hkv, D], v [.., T, Hkv, D]) -> [.., T, Hq * D]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")  # model_type of config.json
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # the others change their frequencies with the length


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
    qkv_bias: torch.Tensor | None = None  # [(Hq + 2 Hkv) D], Qwen2
    q_norm: torch.Tensor | None = None  # [D], Qwen3: norm of each query head, before the rotation
    k_norm: torch.Tensor | None = None  # [D]


class TargetOutput(NamedTuple):
    """Result of one pass over some rows."""

    hidden: torch.Tensor  # [.., T, H] after the final norm: times the head it gives the logits
    captured: torch.Tensor | None  # [.., T, m * H] captured states, layers side by side; None without capture


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, statistics in float32, result in the input's type."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rope_table(length: int, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine tables [length, D] of the half-split ("neox") rotary embedding, without scaling."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)  # [D / 2]
    return _rope_table(length, frequency, 1.0, dtype)


def _rope_table(
    length: int, frequency: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables [length, D] of ``scaling`` times the cosine and sine at frequencies [D / 2]."""
    positions = torch.arange(length, dtype=torch.float64, device=frequency.device)
    angle = torch.outer(positions, frequency.double())  # [length, D / 2]
    angle = torch.cat([angle, angle], dim=-1)  # [length, D]
    return (angle.cos() * scaling).to(dtype), (angle.sin() * scaling).to(dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``x`` [.., T, heads, D] by tables [.., T, D]."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)


def _check_supported(config: Any) -> None:
    """Refuse what this runner would compute wrongly; all problems in one ``ValueError``."""
    if config.model_type not in SUPPORTED:
        raise ValueError(
            f"the target's architecture is {config.model_type!r}; the target runner supports {', '.join(SUPPORTED)}. "
            "Remedy: choose a target of one of these."
        )
    problems = []
    layer_types = getattr(config, "layer_types", None)
    windowed = any(kind != "full_attention" for kind in layer_types) if layer_types else None
    if windowed or (windowed is None and getattr(config, "sliding_window", None) is not None):
        problems.append(
            f"sliding-window attention (sliding_window {config.sliding_window}), expected full attention in all layers"
        )
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type not in STATIC_ROPE:
        problems.append(f"rope_type {rope_type!r}, expected one of {', '.join(STATIC_ROPE)}")
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"partial_rotary_factor {config.rope_parameters['partial_rotary_factor']}, expected 1.0")
    if config.hidden_act != "silu":
        problems.append(f"hidden_act {config.hidden_act!r}, expected 'silu'")
    if getattr(config, "mlp_bias", False):
        problems.append("mlp_bias, expected MLPs without biases")
    if config.model_type != "qwen2" and getattr(config, "attention_bias", False):
        problems.append("attention_bias with a biased output projection, expected biases on q, k and v only (Qwen2)")
    if problems:
        raise ValueError(
            f"this {config.model_type} target cannot be run: {'; '.join(problems)}. Remedy: choose another target, or "
            "for a sliding window longer than every sequence set sliding_window to null in its config.json."
        )


def _scaled_rope(config: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Tables of a scaled rotary embedding, by transformers' own frequencies; None for the default one."""
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type == "default":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequency, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))  # [D / 2]
    return _rope_table(config.max_position_embeddings, frequency, scaling, dtype)


def _layer_weights(layer: Any) -> LayerWeights:
    """Fuse one decoder layer of transformers."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    biased = projections[0].bias is not None
    weights = LayerWeights(
        input_norm=layer.input_layernorm.weight,
        qkv=torch.cat([projection.weight for projection in projections]),
        out=attention.o_proj.weight,
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj.weight,
        qkv_bias=torch.cat([projection.bias for projection in projections]) if biased else None,
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
    )
    return LayerWeights(*(None if tensor is None else tensor.detach().contiguous() for tensor in weights))


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
        rope: tuple[torch.Tensor, torch.Tensor] | None = None,  # cosine and sine [positions, D]; None: from the shape
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
        if rope is None:
            rope = rope_table(shape.max_position_embeddings, shape.head_dim, shape.rope_theta, embedding.dtype)
        self.cos, self.sin = (table.to(embedding.device, embedding.dtype) for table in rope)  # [positions, D] each

    @classmethod
    def load(
        cls,
        path: str | Path,
        dtype: torch.dtype,
        target_layer_ids: Sequence[int] = (),
        device: str | torch.device | None = None,
    ) -> Target:
        """Read a transformers checkpoint directory onto ``device`` (None: torch's default device).

        Raises:
            ValueError: an unsupported architecture.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        # Refused before the weights are read: an unsupported model may be large.
        _check_supported(AutoConfig.from_pretrained(str(path)))
        model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype).to(device or torch.get_default_device())
        return cls.from_transformers(model, target_layer_ids)

    @classmethod
    def from_transformers(cls, model: torch.nn.Module, target_layer_ids: Sequence[int] = ()) -> Target:
        """Fuse the weights of a causal LM of a supported architecture; they stay on the model's device."""
        config, decoder = model.config, model.model
        _check_supported(config)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = TargetShape(
            config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads,
            config.num_key_value_heads, head_dim, config.vocab_size, config.rms_norm_eps,
            float(config.rope_parameters["rope_theta"]), config.max_position_embeddings,
        )  # fmt: skip
        eos = model.generation_config.eos_token_id
        eos_ids = [] if eos is None else list(eos) if isinstance(eos, list | tuple) else [int(eos)]
        embedding = decoder.embed_tokens.weight.detach()
        return cls(
            shape,
            embedding,
            model.lm_head.weight.detach(),
            [_layer_weights(layer) for layer in decoder.layers],
            decoder.norm.weight.detach(),
            target_layer_ids,
            eos_ids,
            _scaled_rope(config, embedding.dtype),
        )

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and activations."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are and everything runs."""
        return self.embedding.device

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
            fused = F.linear(rms_norm(x, layer.input_norm, shape.rms_norm_eps), layer.qkv, layer.qkv_bias)
            heads = fused.unflatten(-1, (-1, shape.head_dim))  # [.., T, Hq + 2 Hkv, D]
            q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=-2)
            if layer.q_norm is not None and layer.k_norm is not None:
                q = rms_norm(q, layer.q_norm, shape.rms_norm_eps)
                k = rms_norm(k, layer.k_norm, shape.rms_norm_eps)
            x = x + F.linear(attend(index, apply_rope(q, cos, sin), apply_rope(k, cos, sin), v), layer.out)
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
            rows = torch.arange(q.shape[2], device=q.device)
            # The diagonal stays open so that padded rows have something to average: no NaN.
            visible = (rows[None, None, :] >= left_pad[:, None, None]) & (rows[None, :, None] >= rows[None, None, :])
            visible = visible | torch.eye(q.shape[2], dtype=torch.bool, device=q.device)  # [B, T, T]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None])
        return out.transpose(1, 2).flatten(-2)  # [B, T, Hq D]

    return attend
