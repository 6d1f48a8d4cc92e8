"""The host's DFlash-family draft models with the relay in their forward.

Owns the relay's parameters and the two places where it touches the drafter: `project_target_hidden` (whose result
for a verified block is what gets relayed: free) and `forward` (where relayed rows join the mask embeddings). Both
run where the host runs them, `forward` inside the draft CUDA graph: only tensor operations on static storage.

Relies on `sglang.srt.models.dflash` (0.5.23): `forward(input_ids, positions, forward_batch, input_embeds)` with
absolute `positions`, `forward_batch.req_pool_indices` (0 in padded rows), row 0 of a block embedding the anchor.
Registered by name in the host's `ModelRegistry`; the classes' names are the architectures of the checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.models.dflash import DFlash2DraftModel, DFlashDraftModel

from sglang_dflow.config import RELAY_PREFIXES, DFlowConfig, raise_problems, tensor_problems
from sglang_dflow.relay.draft_input import EmbedTokens, relayed_input
from sglang_dflow.relay.pool import RelayPool


class RelayMixin:
    """Adds the relay to a host draft model; without an attached pool the model is the host's, unchanged."""

    config: Any

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config=quant_config, prefix=prefix)  # type: ignore[call-arg]
        self.dflow_config = DFlowConfig.from_checkpoint(config.to_dict())
        self.relay = self.dflow_config.make_relay()
        self._pool: RelayPool | None = None
        self._embed_tokens: EmbedTokens | None = None
        self._projected: torch.Tensor | None = None
        self._slots: torch.Tensor | None = None
        self._relay_loaded = False

    def attach_relay(self, pool: RelayPool, embed_tokens: EmbedTokens) -> None:
        """Relay from `pool` from now on; `embed_tokens` maps int64 [N] to the [N, H] that the drafter is fed.

        Raises:
            ValueError: the pool wants kernels, and they cannot serve this drafter.
        """
        if pool.use_kernels:
            from sglang_dflow.relay.kernels.tiles import check_supported

            check_supported(pool, self.relay)
        self._pool = pool
        self._embed_tokens = embed_tokens

    def drafting_slots(self) -> torch.Tensor:
        """Request slots of the last draft forward, int64 [bs]: while a graph is captured, the graph's own buffer."""
        assert self._slots is not None
        return self._slots

    def take_projected(self) -> torch.Tensor | None:
        """Hand over the result of the last `project_target_hidden`, [N, H], once; None if there was none since."""
        projected, self._projected = self._projected, None
        return projected

    def project_target_hidden(self, target_hidden: torch.Tensor) -> torch.Tensor:  # [N, m*H]
        """Return `hidden_norm(fc(.))`, [N, H], and keep it for the relay."""
        self._projected = super().project_target_hidden(target_hidden)  # type: ignore[misc]
        return self._projected

    def forward(
        self,
        input_ids: torch.Tensor,  # [bs * B]
        positions: torch.Tensor,  # [bs * B] absolute
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,  # [bs * B, H]
        **kwargs: Any,
    ) -> Any:
        """Draft one block per request, from relayed states where the pool holds them."""
        if self._pool is not None and input_embeds is not None:
            input_embeds = self._relayed(positions, forward_batch.req_pool_indices, input_embeds)
        return super().forward(input_ids, positions, forward_batch, input_embeds, **kwargs)  # type: ignore[misc]

    @torch.no_grad()
    def _relayed(
        self,
        positions: torch.Tensor,  # [bs * B]
        req_pool_indices: torch.Tensor,  # [bs]
        input_embeds: torch.Tensor,  # [bs * B, H]
    ) -> torch.Tensor:
        pool, embed_tokens = self._pool, self._embed_tokens
        assert pool is not None and embed_tokens is not None
        self._slots = req_pool_indices
        shape = (req_pool_indices.shape[0], pool.block_size)
        blocks = input_embeds.view(*shape, -1)  # [bs, B, H]
        blocks = relayed_input(pool, self.relay, embed_tokens, req_pool_indices, positions.view(shape), blocks)
        return blocks.view(input_embeds.shape)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the drafter's tensors by the host's rules and the relay's by ours.

        The first load must bring every relay tensor; later ones (online weight updates arrive in parts) may bring some.

        Raises:
            ValueError: relay tensors missing or misshaped, all in one message.
        """
        relay: dict[str, torch.Tensor] = {}

        def of_the_drafter() -> Iterable[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                plain = name.removeprefix("model.")
                if plain.startswith(RELAY_PREFIXES):
                    relay[plain] = tensor
                else:
                    yield name, tensor

        super().load_weights(of_the_drafter())  # type: ignore[misc]
        expected = self.dflow_config.tensor_shapes()
        if self._relay_loaded:
            expected = {name: shape for name, shape in expected.items() if name in relay}
        found = {name: tuple(tensor.shape) for name, tensor in relay.items()}
        raise_problems(tensor_problems(expected, found), where="this drafter's safetensors")
        self.relay.load_state_dict({name: relay[name] for name in expected}, strict=not self._relay_loaded)
        self._relay_loaded = True


class DFlowDraftModel(RelayMixin, DFlashDraftModel):
    """DFlash or Domino drafter with a relay."""


class DFlow2DraftModel(RelayMixin, DFlash2DraftModel):
    """DFlash2 (candidate selector) drafter with a relay."""


EntryClass = [DFlowDraftModel, DFlow2DraftModel]
