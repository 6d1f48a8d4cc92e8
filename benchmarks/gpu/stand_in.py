"""A DFLASH round's shape without SGLang: Qwen3-sized layers with random weights, for the relay's share of a round.

Layers run as plain torch operations (cuBLAS, `scaled_dot_product_attention` over a filled cache of `CONTEXT` tokens),
captured in a CUDA graph by the caller. No rotary embedding, sampling or scheduler: fewer bytes than a served round, but
unfused norms and activations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.relay_budget import BLOCK_SIZE, CONTEXT, DRAFT_LAYERS, Target

HEAD_SIZE = 128


class Layers:
    """`layers` decoder layers of a target's size."""

    def __init__(self, target: Target, layers: int, batch_size: int, device: str) -> None:
        self.target = target
        hidden, heads, kv_heads = target.hidden_size, target.heads, target.kv_heads

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16) * shape[-1] ** -0.5

        def layer() -> dict[str, torch.Tensor]:
            return {
                "qkv": weights((heads + 2 * kv_heads) * HEAD_SIZE, hidden),
                "out": weights(hidden, heads * HEAD_SIZE),
                "up": weights(2 * target.intermediate_size, hidden),
                "down": weights(hidden, target.intermediate_size),
                "norm": weights(hidden),
                "cache": weights(2, batch_size, kv_heads, CONTEXT + BLOCK_SIZE, HEAD_SIZE),
            }

        self.layers = [layer() for _ in range(layers)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [bs * B, H]
        heads, kv_heads, hidden = self.target.heads, self.target.kv_heads, self.target.hidden_size
        for layer in self.layers:
            normed = F.rms_norm(x, (hidden,), layer["norm"])
            q, k, v = F.linear(normed, layer["qkv"]).split([n * HEAD_SIZE for n in (heads, kv_heads, kv_heads)], dim=-1)
            split = (layer["cache"].shape[1], BLOCK_SIZE, -1, HEAD_SIZE)
            q, k, v = (part.view(split).transpose(1, 2) for part in (q, k, v))  # [bs, heads, B, 128]
            keys, values = layer["cache"]
            keys[:, :, CONTEXT:] = k
            values[:, :, CONTEXT:] = v
            attended = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
            x = x + F.linear(attended.transpose(1, 2).reshape(len(x), -1), layer["out"])
            gate, up = F.linear(F.rms_norm(x, (hidden,), layer["norm"]), layer["up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        return x


class Round:
    """Draft, draft head, verification, head, projection of the verified block."""

    def __init__(self, target: Target, batch_size: int, device: str) -> None:
        self.draft = Layers(target, DRAFT_LAYERS, batch_size, device)
        self.verify = Layers(target, target.layers, batch_size, device)
        hidden = target.hidden_size
        self.head = torch.randn(target.vocabulary, hidden, device=device, dtype=torch.bfloat16) * hidden**-0.5
        self.project = torch.randn(hidden, 5 * hidden, device=device, dtype=torch.bfloat16) * hidden**-0.5

    def __call__(self, blocks: torch.Tensor) -> torch.Tensor:  # [bs * B, H] -> [bs * B, H]
        drafted = F.linear(self.draft(blocks), self.head).argmax(dim=-1)
        verified = self.verify(self.head[drafted])
        F.linear(verified, self.head).argmax(dim=-1)
        return F.linear(verified.repeat(1, 5), self.project)
