"""The drafter's input rows with the relay in them.

Owns one function: from the pool and a draft batch's absolute positions to the rows that the drafter is fed. Tensor
operations on static storage only, so that a CUDA graph captures it: no host read, no branch on a tensor's contents.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_dflow.relay.modulation import RelayModulation
from sglang_dflow.relay.pool import RelayPool

EmbedTokens = Callable[[torch.Tensor], torch.Tensor]
"""int64 [N] -> [N, H]: the embedding that feeds the drafter."""


def relayed_input(
    pool: RelayPool,
    relay: RelayModulation,
    embed_tokens: EmbedTokens,
    req_pool_indices: torch.Tensor,  # int64 [bs]; 0 in padded rows
    positions: torch.Tensor,  # int64 [bs, B] absolute
    blocks: torch.Tensor,  # [bs, B, H] anchor and mask embeddings
) -> torch.Tensor:
    """Return the blocks [bs, B, H] with the relay added where the pool holds it; other rows keep their bits."""
    read = pool.read(req_pool_indices, positions)  # R = B - first_row
    # One lookup for all tokens that the relay reads: under tensor parallelism each is a collective.
    tokens = [read.bonus, read.rejected] + ([] if read.stale is None else [read.stale.flatten()])
    bonus, rejected, *stale = embed_tokens(torch.cat(tokens)).to(blocks.dtype).split([len(ids) for ids in tokens])
    delta = relay(read.hidden, bonus, rejected, *(part.view(read.hidden.shape) for part in stale))  # [bs, R, H]
    first_row = pool.rule.first_row
    masks = blocks[:, first_row:]  # [bs, R, H]
    # `where`, not a product: a row without relay keeps its bits whatever its source row holds (I5).
    relayed = torch.where(read.mask.unsqueeze(-1), masks + delta, masks)  # [bs, R, H]
    return torch.cat((blocks[:, :first_row], relayed), dim=1)
