"""The training twin of the host's DFlash draft model, plus the relay and the Domino head.

Owns the drafter's parameters (names of the z-lab / SpecForge layout: ``layers.N.self_attn.q_proj.weight`` ..,
``fc.weight``, ``hidden_norm.weight``, ``norm.weight``, the relay's and the Domino head's), its config.json and its
packed forward.
Follows ``DFlashDraftModel`` of SGLang 0.5.23:

- context K/V of every layer come from ``hidden_norm(fc(captured))`` through that layer's k/v projections alone,
  with k-norm and rotary at the absolute position;
- a block's rows (anchor and masks) see the context strictly before the anchor's position and, bidirectionally,
  their own block; the anchor's own K/V come from its embedding, not from a captured state;
- the target's embedding and head are borrowed, so logits are ``target.logits(norm(x))``.

Dimensions: S sequences, A anchors per sequence, B block size, T context rows, H hidden, D head, m captured layers.
Parameters are float32 (master weights) and are cast to the type of the activations where they are used.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from sglang_dflow.checkpoint_files import read_tensors
from sglang_dflow.config import RELAY_PREFIXES, RESCORE_FIELDS
from sglang_dflow.relay.modulation import RelayModulation
from sglang_dflow.relay.rescore import RelayRescorer
from sglang_dflow.training.domino import DOMINO_PREFIXES, PURE_DRAFT_PREFIX_LEN, DominoHead
from sglang_dflow.training.target import Target, apply_rope, rope_table


@dataclass(frozen=True)
class DrafterConfig:
    """Everything that shapes a drafter; the config.json is written from it and read back into it."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    num_target_layers: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    relay_source: str = "first_rejection"
    relay_hidden_size: int = 0  # 0: a plain DFlash drafter
    relay_activation: str = "silu"
    relay_stale_token: bool = False
    relay_rescore_size: int = 0  # 0: no rescorer; else with the two fields below
    relay_rescore_top_k: int = 0
    relay_rescore_code_size: int = 0
    projector_type: str | None = None  # "domino": a Domino head, with the three fields below
    gru_hidden_dim: int = 0
    emb_dim: int = 0
    shift_label: bool = False  # row t predicts the token at P + t + 1 instead of the one at P + t

    def __post_init__(self) -> None:
        """Refuse a head that the host would not build.

        Raises:
            ValueError: another projector than Domino, or Domino fields that do not belong together.
        """
        if self.projector_type not in (None, "domino"):
            raise ValueError(f"projector_type is {self.projector_type!r}, expected 'domino' or none.")
        sizes = (self.gru_hidden_dim, self.emb_dim)
        if self.is_domino and min(sizes) < 1:
            raise ValueError(
                f"a Domino drafter has gru_hidden_dim {sizes[0]} and emb_dim {sizes[1]}, expected two positive sizes."
            )
        if self.relay_rescore_size and (self.is_domino or not self.relay_stale_token):
            raise ValueError(
                f"relay_rescore_size is {self.relay_rescore_size} with projector_type {self.projector_type!r} and "
                f"relay_stale_token {self.relay_stale_token}; a rescorer needs the plain head and the stale token."
            )
        if not self.is_domino and (any(sizes) or self.shift_label):
            raise ValueError(
                f"gru_hidden_dim {sizes[0]}, emb_dim {sizes[1]}, shift_label {self.shift_label} without a Domino head; "
                "expected projector_type 'domino', or none of them: the host reads them for Domino drafters only."
            )

    def make_rescorer(self) -> RelayRescorer:
        """A new rescorer of these sizes."""
        top_k, code_size = self.relay_rescore_top_k, self.relay_rescore_code_size
        return RelayRescorer(
            self.block_size, self.hidden_size, self.relay_rescore_size, top_k=top_k, code_size=code_size
        )

    @property
    def is_domino(self) -> bool:
        """Whether the drafter has a Domino head."""
        return self.projector_type == "domino"

    @classmethod
    def for_target(cls, target: Target, **fields: Any) -> DrafterConfig:
        """Sizes of the target, the rest by keyword."""
        shape = target.shape
        return cls(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab_size,
            rms_norm_eps=shape.rms_norm_eps,
            rope_theta=shape.rope_theta,
            max_position_embeddings=shape.max_position_embeddings,
            num_target_layers=shape.num_layers,
            target_layer_ids=tuple(target.target_layer_ids),
            **fields,
        )

    def to_json(self, dtype: str) -> dict[str, Any]:
        """The checkpoint's config.json, as the host reads it."""
        relay = self.relay_hidden_size > 0
        config: dict[str, Any] = {
            "architectures": ["DFlowDraftModel" if relay else "DFlashDraftModel"],
            "model_type": "qwen3",  # the family's convention: q/k norms, no biases
            "attention_bias": False,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
        }
        if self.is_domino:
            config["dflash_config"] |= {
                "projector_type": self.projector_type,
                "gru_hidden_dim": self.gru_hidden_dim,
                "emb_dim": self.emb_dim,
                "shift_label": self.shift_label,
                "pure_draft_prefix_len": PURE_DRAFT_PREFIX_LEN,
            }
        if relay:
            config["dflow_config"] = {
                "relay_source": self.relay_source,
                "relay_hidden_size": self.relay_hidden_size,
                "relay_activation": self.relay_activation,
            }
            if self.relay_stale_token:
                config["dflow_config"]["relay_stale_token"] = True
            if self.relay_rescore_size:
                config["dflow_config"] |= {name: getattr(self, name) for name in RESCORE_FIELDS}
        return config | {
            "dtype": dtype,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "max_position_embeddings": self.max_position_embeddings,
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": True,
            "vocab_size": self.vocab_size,
        }

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> DrafterConfig:
        """Read a config.json written by ``to_json`` (or a checkpoint of the family with the same fields)."""
        # The host looks into dflash_config first, then at top level.
        merged = config | config.get("dflow_config", {}) | config["dflash_config"]
        fields = {f.name: merged[f.name] for f in dataclasses.fields(cls) if f.name in merged}
        if merged.get("projector_type") != "domino":
            fields = {name: value for name, value in fields.items() if name not in _DOMINO_FIELDS}
        elif merged.get("pure_draft_prefix_len") != PURE_DRAFT_PREFIX_LEN:
            raise ValueError(
                f"dflash_config.pure_draft_prefix_len is {merged.get('pure_draft_prefix_len')!r}, expected "
                f"{PURE_DRAFT_PREFIX_LEN}: neither this trainer nor SGLang 0.5.23 has another Domino head."
            )
        return cls(**fields | {"target_layer_ids": tuple(fields["target_layer_ids"])})


_DOMINO_FIELDS = ("gru_hidden_dim", "emb_dim", "shift_label")


def linear(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """One product with several weights [out_i, in] stacked, in the type of ``x``."""
    weight = torch.cat([w.to(x.dtype) for w in weights]) if len(weights) > 1 else weights[0].to(x.dtype)
    return F.linear(x, weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight; statistics in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm over the last dimension."""
        # In float32 and rounded once, as the host does. Rounding scale and product apart is a third faster but was the
        # largest difference from the served drafter: tests/host/test_parity.py failed its bf16 Domino cases with it.
        weight = self.weight.to(x.dtype).float()
        return F.rms_norm(x.float(), (x.shape[-1],), weight, self.eps).to(x.dtype)


class ContextKV(NamedTuple):
    """Keys and values of the context in one layer."""

    key: torch.Tensor  # [S, Hkv, T, D], k-norm and rotary applied
    value: torch.Tensor  # [S, Hkv, T, D]


class Attention(nn.Module):
    """Grouped-query attention of a block on context and block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, head = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, head
        self.q_proj = nn.Linear(hidden, self.heads * head, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * head, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * head, bias=False)
        self.o_proj = nn.Linear(self.heads * head, hidden, bias=False)
        self.q_norm = RMSNorm(head, config.rms_norm_eps)
        self.k_norm = RMSNorm(head, config.rms_norm_eps)

    def context(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> ContextKV:
        """K/V of context rows: hidden [S, T, H], tables [T, D] or [S, T, D]."""
        kv = linear(hidden, self.k_proj.weight, self.v_proj.weight).unflatten(-1, (2 * self.kv_heads, -1))
        key, value = kv.chunk(2, dim=-2)  # [S, T, Hkv, D] each
        key = apply_rope(self.k_norm(key), cos, sin)
        return ContextKV(key.transpose(1, 2), value.transpose(1, 2))

    def forward(
        self,
        x: torch.Tensor,  # [S, Q, H] with Q = A * B block rows
        cos: torch.Tensor,  # [S, Q, D]
        sin: torch.Tensor,
        context: ContextKV,
        before: torch.Tensor,  # [S, 1, 1, A, 1, T] additive mask of the context, see ``context_mask``
    ) -> torch.Tensor:
        """Attend; returns [S, Q, H].

        Scores on the context and on the block's own rows are separate products under one softmax: a dense mask over
        [T + A * B] keys would spend more than half its work on other blocks (measured: twice as slow, both ways).
        """
        groups, count = self.heads // self.kv_heads, before.shape[3]
        fused = linear(x, self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        heads = fused.unflatten(-1, (-1, self.head_dim))  # [S, Q, Hq + 2 Hkv, D]
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=-2)
        q = apply_rope(self.q_norm(q), cos, sin) * self.head_dim**-0.5
        k = apply_rope(self.k_norm(k), cos, sin)
        # Query groups that share a kv head become extra rows: no repeated keys, no extra gradients to sum.
        q = q.unflatten(2, (self.kv_heads, groups)).permute(0, 2, 3, 1, 4)  # [S, Hkv, groups, Q, D]
        k, v = k.transpose(1, 2), v.transpose(1, 2)  # [S, Hkv, Q, D]
        wide, blocks = q.flatten(2, 3), (count, x.shape[1] // count)  # [S, Hkv, groups * Q, D]; (A, B)
        far = (wide @ context.key.transpose(-1, -2)).unflatten(2, (groups, *blocks)) + before  # [S, Hkv, g, A, B, T]
        own_k, own_v = (t.unflatten(2, blocks)[:, :, None] for t in (k, v))  # [S, Hkv, 1, A, B, D]
        near = q.unflatten(3, blocks) @ own_k.transpose(-1, -2)  # [S, Hkv, g, A, B, B]
        weights = torch.softmax(torch.cat([far, near], dim=-1), dim=-1)
        far, near = weights.split([context.key.shape[2], blocks[1]], dim=-1)
        out = far.flatten(2, 4) @ context.value  # [S, Hkv, groups * Q, D]
        out = out.unflatten(2, (groups, *blocks)) + near @ own_v  # [S, Hkv, g, A, B, D]
        out = out.permute(0, 3, 4, 1, 2, 5).flatten(3).flatten(1, 2)  # [S, Q, Hq D]
        return linear(out, self.o_proj.weight)


class MLP(nn.Module):
    """Gated SiLU MLP."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., H] -> [.., H]."""
        return linear(F.silu(linear(x, self.gate_proj.weight)) * linear(x, self.up_proj.weight), self.down_proj.weight)


class Layer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context: ContextKV, before: torch.Tensor
    ) -> torch.Tensor:
        """[S, Q, H] -> [S, Q, H]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, context, before)
        return x + self.mlp(self.post_attention_layernorm(x))


class Context(NamedTuple):
    """The projected context of a batch of sequences."""

    kv: list[ContextKV]  # one per layer
    length: int  # T, padding included: the mask hides rows at or behind an anchor, so padding is never seen


def context_mask(anchors: torch.Tensor, context_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [S, 1, 1, A, 1, T]: a block sees context rows strictly before its anchor [S, A].

    The captured state at the anchor's own position does not exist yet when the block is drafted.
    """
    hidden = torch.arange(context_rows) >= anchors[:, :, None]  # [S, A, T]
    bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return bias[:, None, None, :, None]


class Drafter(nn.Module):
    """DFlash drafter with an optional relay and an optional Domino head."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.relay: RelayModulation | None = None
        if config.relay_hidden_size:
            self.relay = RelayModulation(
                config.hidden_size,
                config.relay_hidden_size,
                activation=config.relay_activation,
                norm_eps=config.rms_norm_eps,
                stale_token=config.relay_stale_token,
                rescorer=config.make_rescorer() if config.relay_rescore_size else None,
            )
        self.domino: DominoHead | None = None
        if config.is_domino:
            self.domino = DominoHead(
                config.hidden_size,
                config.gru_hidden_dim,
                config.emb_dim,
                config.vocab_size,
                shift_label=config.shift_label,
            )
        cos, sin = rope_table(
            min(config.max_position_embeddings, 8192), config.head_dim, config.rope_theta, torch.float32
        )
        self.register_buffer("cos", cos, persistent=False)  # [positions, D]
        self.register_buffer("sin", sin, persistent=False)

    @property
    def rescorer(self) -> RelayRescorer | None:
        """What looks at the drafts again, if the drafter has one."""
        return None if self.relay is None else self.relay.relay_rescore

    def project(self, captured: torch.Tensor) -> torch.Tensor:
        """``h = hidden_norm(fc(captured))``: [.., m * H] -> [.., H]; the host's ``project_target_hidden``."""
        return self.hidden_norm(linear(captured, self.fc.weight))

    def context(self, captured: torch.Tensor) -> Context:
        """Context K/V of sequences from position 0 on: captured [S, T, m * H]."""
        hidden, rows = self.project(captured), captured.shape[1]
        cos, sin = self.cos[:rows].to(hidden.dtype), self.sin[:rows].to(hidden.dtype)
        return Context([layer.self_attn.context(hidden, cos, sin) for layer in self.layers], rows)

    def forward(
        self,
        embeds: torch.Tensor,  # [S, A, B, H] anchor and (relayed) mask embeddings
        anchors: torch.Tensor,  # [S, A] absolute positions
        context: Context,
    ) -> torch.Tensor:
        """Hidden states after the final norm, [S, A, B, H]."""
        _, count, block, _ = embeds.shape
        before = context_mask(anchors, context.length, embeds.dtype)
        positions = (anchors[:, :, None] + torch.arange(block)).flatten(1)  # [S, A * B]
        cos, sin = self.cos[positions].to(embeds.dtype), self.sin[positions].to(embeds.dtype)
        x = embeds.flatten(1, 2)  # [S, A * B, H]
        for layer, kv in zip(self.layers, context.kv):
            x = layer(x, cos, sin, kv, before)
        return self.norm(x).unflatten(1, (count, block))

    def plain_embeds(self, target: Target, anchor_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Input rows without relay: anchor ids [..] -> [.., B, H]."""
        ids = torch.full((*anchor_ids.shape, self.config.block_size), self.config.mask_token_id)
        ids[..., 0] = anchor_ids
        return target.embed(ids).to(dtype)

    # --- checkpoints -------------------------------------------------------------------------------------

    def checkpoint_tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Tensors by their checkpoint names."""
        state = {
            name.removeprefix("relay.").removeprefix("domino."): tensor for name, tensor in self.state_dict().items()
        }
        dtypes = {name: tensor.dtype if name.startswith("relay_rescore.") else dtype for name, tensor in state.items()}
        return {name: tensor.detach().to(dtypes[name]).contiguous().clone() for name, tensor in state.items()}

    def save(self, directory: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write config.json and model.safetensors as the host loads them."""
        from safetensors.torch import save_file

        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        config = self.config.to_json(str(dtype).removeprefix("torch."))
        partial = directory / "model.safetensors.part"
        save_file(self.checkpoint_tensors(dtype), partial, metadata={"format": "pt"})
        partial.chmod(0o644)
        partial.replace(directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    @classmethod
    def load(cls, directory: str | Path) -> Drafter:
        """Read a checkpoint directory into float32 master weights."""
        directory = Path(directory)
        drafter = cls(DrafterConfig.from_json(json.loads((directory / "config.json").read_text())))
        tensors = read_tensors(directory)
        prefixes = dict.fromkeys(RELAY_PREFIXES, "relay.") | dict.fromkeys(DOMINO_PREFIXES, "domino.")
        state = {
            next((owner for prefix, owner in prefixes.items() if name.startswith(prefix)), "") + name: tensor.float()
            for name, tensor in tensors.items()
            if drafter.rescorer is not None or not name.startswith("relay_rescore.")  # switched off by its size, 0
        }
        drafter.load_state_dict(state)
        return drafter

    @torch.no_grad()
    def init_from_target(self, target: Target, source_layers: list[int]) -> None:
        """Start layers, norms and ``fc`` from the target's own.

        ``fc`` starts by selecting the deepest captured layer, ``hidden_norm`` as the input norm of the layer above
        it: context keys and values then begin as (nearly) the target's own. Where the target has no q/k norms, which
        bound an attention logit by ``sqrt(D) * g_q * g_k``, gains of 1.5 keep enough range for peaked heads. Biases of
        the target's attention are left out: the family has none.
        """
        hidden, config = self.config.hidden_size, self.config
        for layer, index in zip(self.layers, source_layers, strict=True):
            weights = target.layers[index]
            sizes = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
            q, k, v = weights.qkv.float().split([count * config.head_dim for count in sizes])
            gate, up = weights.gate_up.float().chunk(2)
            attention, mlp = layer.self_attn, layer.mlp
            pairs = [
                (attention.q_proj, q), (attention.k_proj, k), (attention.v_proj, v), (attention.o_proj, weights.out),
                (mlp.gate_proj, gate), (mlp.up_proj, up), (mlp.down_proj, weights.down),
                (layer.input_layernorm, weights.input_norm), (layer.post_attention_layernorm, weights.post_norm),
            ]  # fmt: skip
            for module, value in pairs:
                module.weight.copy_(value)
            for norm, own in ((attention.q_norm, weights.q_norm), (attention.k_norm, weights.k_norm)):
                norm.weight.fill_(1.5) if own is None else norm.weight.copy_(own)
        self.norm.weight.copy_(target.final_norm)
        deepest = max(range(len(config.target_layer_ids)), key=lambda i: config.target_layer_ids[i])
        self.fc.weight.zero_()
        self.fc.weight[:, deepest * hidden : (deepest + 1) * hidden] = torch.eye(hidden)
        above = min(config.target_layer_ids[deepest] + 1, target.shape.num_layers - 1)
        self.hidden_norm.weight.copy_(target.layers[above].input_norm)
