"""The drafter's input rows with the relay in them.

Owns one function: from the pool and a draft batch's absolute positions to the rows that the drafter is fed. Tensor
operations on static storage only, so that a CUDA graph captures it: no host read, no branch on a tensor's contents.
Pools with kernels (CUDA) take those of `relay/kernels`; the torch operations here are their reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang_dflow.relay.modulation import RelayModulation
from sglang_dflow.relay.pool import DraftRows, RelayPool

EmbedTokens = Callable[[torch.Tensor], torch.Tensor]
"""int64 [N] -> [N, H]: the embedding that feeds the drafter."""


@dataclass(frozen=True)
class TokenTable:
    """An embedding that is a table times a factor and nothing else: the kernels then read its rows themselves.

    Attributes:
        weight: [V, H], the module's own parameter, so that weight updates in place are seen.
        scale: factor of every embedding.
    """

    weight: torch.Tensor
    scale: float = 1.0

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:  # [N] -> [N, H]
        embeddings = F.embedding(token_ids, self.weight)
        return embeddings if self.scale == 1.0 else embeddings * self.scale


def relayed_input(
    pool: RelayPool,
    relay: RelayModulation,
    embed_tokens: EmbedTokens,
    req_pool_indices: torch.Tensor,  # int64 [bs]; 0 in padded rows
    positions: torch.Tensor,  # int64 [bs, B] absolute
    blocks: torch.Tensor,  # [bs, B, H] anchor and mask embeddings
) -> torch.Tensor:
    """Return the blocks [bs, B, H] with the relay added where the pool holds it; other rows keep their bits.

    A row whose relay is not finite (a NaN in its state, an overflow) keeps its mask embedding's bits, too, and is
    counted: one bad state may cost a draft, never poison the block. With kernels `blocks` itself is changed.
    """
    if pool.use_kernels:
        _relay_in_place(pool, relay, embed_tokens, req_pool_indices, positions, blocks)
        return blocks
    read = pool.read(req_pool_indices, positions)  # R = B - first_row
    # One lookup for all tokens that the relay reads: under tensor parallelism each is a collective.
    tokens = [read.bonus, read.rejected] + ([] if read.stale is None else [read.stale.flatten()])
    bonus, rejected, *stale = embed_tokens(torch.cat(tokens)).to(blocks.dtype).split([len(ids) for ids in tokens])
    delta = relay(read.hidden, bonus, rejected, *(part.view(read.hidden.shape) for part in stale))  # [bs, R, H]
    first_row = pool.rule.first_row
    masks = blocks[:, first_row:]  # [bs, R, H]
    finite = delta.isfinite().all(dim=-1)  # [bs, R]
    relayed = read.mask & finite  # [bs, R]
    refused = read.mask & ~finite  # [bs, R]
    pool.note_draft(req_pool_indices, DraftRows(relayed.sum(dim=1), refused.sum(dim=1), read.accept_len))
    # `where`, not a product: a row without relay keeps its bits whatever its source row holds (I5).
    rows = torch.where(relayed.unsqueeze(-1), masks + delta, masks)  # [bs, R, H]
    return torch.cat((blocks[:, :first_row], rows), dim=1)


def _relay_in_place(
    pool: RelayPool,
    relay: RelayModulation,
    embed_tokens: EmbedTokens,
    req_pool_indices: torch.Tensor,
    positions: torch.Tensor,
    blocks: torch.Tensor,
) -> None:
    from sglang_dflow.relay.kernels.apply import relay_apply
    from sglang_dflow.relay.kernels.gather import Embeddings, relay_gather
    from sglang_dflow.relay.kernels.tokens import relay_tokens

    if isinstance(embed_tokens, TokenTable):
        embeddings = Embeddings(embed_tokens.weight, looked_up=False, scale=embed_tokens.scale)
    else:
        embeddings = Embeddings(embed_tokens(relay_tokens(pool, req_pool_indices, positions)), looked_up=True)
    activations = relay_gather(pool, relay, embeddings, req_pool_indices, positions)  # [bs, R, W]
    relay_apply(pool, relay, activations, req_pool_indices, positions, blocks)
