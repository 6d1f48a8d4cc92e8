"""The relay's arithmetic: what a relayed state adds to a mask embedding.

    [beta_i ; gamma_i] = W2 act(W_b E(b) + W_d E(d_{a+1}) + W_h h_i [+ W_s E(s_i)] + bias1) + bias2
    x_i = E_mask + beta_i * LayerNorm(h_i) + gamma_i

`s_i`, optional, is the *stale token*: the target's own top-1 at the verified row that `h_i` comes from. It is its
guess for the very position that row `i` drafts, made behind a rejected token, and it costs nothing (greedy
verification computes it); the projected state carries it only as far as `fc` happens to let it through.

Owns the parameters `relay_norm.{weight,bias}` and `relay_mlp.{0,2}.{weight,bias}` (the public precedent's names;
the order of the first linear's input is `[E(b); E(d); h]`, then `E(s)`). The first linear is split: its boundary part
is computed once per request, the rest once per row. The last layer starts at zero, so that a converted DFlash
drafter decodes exactly as before. Shared by the trainer and the served drafter.

Source: arXiv 2609.06498, equation of the modulation; depth, width, activation and initialisation are open there. The
stale token is ours (docs/decisions.md).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from sglang_dflow.relay.rescore import RelayRescorer

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "relu": nn.ReLU,
}

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Input [..., K], weight [N, K], bias [N] or None -> [..., N]."""


class RelayModulation(nn.Module):
    """LayerNorm and two-layer MLP of the relay; `H` is the drafter's hidden size, `R` the rows of a block."""

    def __init__(
        self,
        hidden_size: int,
        relay_hidden_size: int,
        *,
        activation: str = "silu",
        norm_eps: float = 1e-6,
        stale_token: bool = False,
        rescorer: RelayRescorer | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"relay_activation is {activation!r}, expected one of {sorted(ACTIVATIONS)}. "
                "Correct dflow_config.relay_activation in the drafter's config.json."
            )
        self.hidden_size = hidden_size
        self.stale_token = stale_token
        self.relay_norm = nn.LayerNorm(hidden_size, eps=norm_eps)
        self.relay_mlp = nn.Sequential(
            nn.Linear((4 if stale_token else 3) * hidden_size, relay_hidden_size),
            ACTIVATIONS[activation](),
            nn.Linear(relay_hidden_size, 2 * hidden_size),
        )
        self.relay_rescore = rescorer  # not part of the modulation; here because it belongs to the same checkpoint
        self.linear: Linear = F.linear  # a platform may put its own matrix product here
        self.zero_init()

    def zero_init(self) -> None:
        """Zero the last layer: the relay then adds exactly nothing."""
        nn.init.zeros_(self.relay_mlp[2].weight)
        nn.init.zeros_(self.relay_mlp[2].bias)

    def boundary_term(
        self,
        bonus_embed: torch.Tensor,  # [..., H]
        rejected_embed: torch.Tensor,  # [..., H]
    ) -> torch.Tensor:
        """Return the first linear's per-request part, bias included: [..., relay_hidden_size]."""
        first = self.relay_mlp[0]
        boundary = torch.cat((bonus_embed, rejected_embed), dim=-1)  # [..., 2H]
        return self.linear(boundary, first.weight[:, : 2 * self.hidden_size], first.bias)

    def forward(
        self,
        hidden: torch.Tensor,  # [..., R, H] projected verifier states h_i
        bonus_embed: torch.Tensor,  # [..., H]
        rejected_embed: torch.Tensor,  # [..., H]
        stale_embed: torch.Tensor | None = None,  # [..., R, H], given exactly if `stale_token`
    ) -> torch.Tensor:
        """Return `beta_i * LayerNorm(h_i) + gamma_i`, [..., R, H], to be added to the mask embeddings."""
        first, activation, second = self.relay_mlp
        rows = hidden if stale_embed is None else torch.cat((hidden, stale_embed), dim=-1)  # [..., R, H or 2H]
        state = self.linear(rows, first.weight[:, 2 * self.hidden_size :], None)  # [..., R, W]
        boundary = self.boundary_term(bonus_embed, rejected_embed)  # [..., W]
        inner = activation(state + boundary.unsqueeze(-2))  # [..., R, W]
        beta, gamma = self.linear(inner, second.weight, second.bias).chunk(2, dim=-1)  # [..., R, H] each
        return torch.addcmul(gamma, beta, self.relay_norm(hidden))
