"""Rollouts: a drafter's own proposals, judged by the frozen target, with the states of every proposed row.

Owns the packed verification: one target forward per sequence over the context rows and all blocks at once; block
rows see the context strictly before their anchor and, causally, their own block. The boundary is the first mismatch
with the trajectory, which is the target's own greedy text. Used by training (relayed rows of the next round) and,
by the same function, by tests.

Rollouts are made once per refresh and kept in memory (B * m * H bf16 values a block), since a target pass costs
several drafter steps: relayed states are those of the drafter that made them, up to one refresh old.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from sglang_dflow.relay.alignment import RelayRule, relay_rows
from sglang_dflow.training.dataset import Batch, Sample, collate, sample_anchors
from sglang_dflow.training.drafter import Context, ContextKV, Drafter
from sglang_dflow.training.target import Attend, Target, TargetShape


class Rollout(NamedTuple):
    """Round 0 of one sequence at A anchors."""

    anchors: torch.Tensor  # [A] P
    proposals: torch.Tensor  # [A, B] row 0 the anchor token, rows 1.. the drafter's greedy proposals
    accept_len: torch.Tensor  # [A] a
    states: torch.Tensor  # [A, B, m * H] captured states of the proposed rows


class Relayed(NamedTuple):
    """What the next round of some blocks takes from the verified one."""

    anchors: torch.Tensor  # [.., A] P'
    bonus: torch.Tensor  # [.., A] token at P'
    rejected: torch.Tensor  # [.., A] d_{a+1}
    states: torch.Tensor  # [.., A, B, m * H] states moved to the rows of the next block
    mask: torch.Tensor  # [.., A, B] rows that take a relay


def accepted(proposals: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Accepted drafts a [..]: the longest prefix of rows 1.. equal to the trajectory; all arguments [.., B]."""
    match = (proposals[..., 1:] == labels[..., 1:]) & valid[..., 1:]
    return match.long().cumprod(-1).sum(-1)


def packed_attend(shape: TargetShape, bias: torch.Tensor) -> Attend:
    """Attention of one packed sequence of rows under a dense additive mask [R, R]."""
    groups = shape.num_heads // shape.num_kv_heads
    repeated = bias.repeat(groups, 1)[None, None]  # [1, 1, groups * R, R]

    def attend(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = q.shape[1]
        q = q.unflatten(2, (shape.num_kv_heads, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=repeated)
        return out.unflatten(2, (groups, rows)).permute(0, 3, 1, 2, 4).flatten(2)  # [1, R, Hq D]

    return attend


def verification_mask(anchors: torch.Tensor, context_rows: int, block_size: int) -> torch.Tensor:
    """Who sees whom when T context rows and A blocks share one target forward: bool [T + A * B] squared.

    Context rows are causal; a block row sees the context strictly before its anchor and its own block causally.
    """
    count = anchors.shape[0]
    total = context_rows + count * block_size
    visible = torch.zeros(total, total, dtype=torch.bool)
    visible[:context_rows, :context_rows] = torch.ones(context_rows, context_rows, dtype=torch.bool).tril()
    before = torch.arange(context_rows) < anchors[:, None]  # [A, T]
    visible[context_rows:, :context_rows] = before.repeat_interleave(block_size, dim=0)
    causal = torch.ones(block_size, block_size, dtype=torch.bool).tril()
    visible[context_rows:, context_rows:] = torch.block_diag(*[causal] * count).bool()
    return visible


@torch.no_grad()
def verify_packed(
    target: Target,
    tokens: torch.Tensor,  # [N] the trajectory
    anchors: torch.Tensor,  # [A]
    proposals: torch.Tensor,  # [A, B]
) -> torch.Tensor:
    """Captured states [A, B, m * H] of all proposed rows, from one target forward."""
    count, block = proposals.shape
    context = int(anchors.max())  # rows at or behind the last anchor are seen by nobody
    visible = verification_mask(anchors, context, block)
    bias = torch.zeros(visible.shape, dtype=target.dtype).masked_fill_(~visible, float("-inf"))
    ids = torch.cat([tokens[:context], proposals.flatten()])[None]
    positions = torch.cat([torch.arange(context), (anchors[:, None] + torch.arange(block)).flatten()])[None]
    captured = target.forward(ids, positions, packed_attend(target.shape, bias), capture=True).captured
    assert captured is not None
    return captured[0, context:].view(count, block, -1)


@torch.no_grad()
def propose(
    drafter: Drafter, target: Target, embeds: torch.Tensor, anchors: torch.Tensor, context: Context
) -> torch.Tensor:
    """Greedy proposals [S, A, B - 1] for blocks with the given input rows [S, A, B, H]."""
    hidden = drafter(embeds, anchors, context)[:, :, 1:]
    # Two-dimensional rows: a strided 4-d input makes torch multiply block by block, each reading the whole head.
    rows = hidden.reshape(-1, hidden.shape[-1]).to(target.dtype)
    return torch.cat([target.logits(part).argmax(-1) for part in rows.split(128)]).view(hidden.shape[:-1])


def make_rollout(drafter: Drafter, target: Target, sample: Sample, count: int, generator: torch.Generator) -> Rollout:
    """Draft and verify ``count`` blocks of one sequence."""
    block = drafter.config.block_size
    batch = collate([sample], [0], block)
    anchors = sample_anchors(batch, count, generator).unique(dim=1)  # [1, A]
    anchor_ids = batch.tokens.gather(1, anchors)
    with torch.no_grad():
        context = drafter.context(batch.captured.to(target.dtype))
    drafts = propose(drafter, target, drafter.plain_embeds(target, anchor_ids, target.dtype), anchors, context)
    proposals = torch.cat([anchor_ids[:, :, None], drafts], dim=-1)[0]  # [A, B]
    positions = anchors[0][:, None] + torch.arange(block)
    length = len(sample.tokens)
    labels = batch.tokens[0][positions.clamp_max(length - 1)]
    accept_len = accepted(proposals, labels, positions < length)
    return Rollout(anchors[0], proposals, accept_len, verify_packed(target, sample.tokens, anchors[0], proposals))


def next_round(rollout: Rollout, tokens: torch.Tensor, rule: RelayRule, block_size: int) -> Relayed:
    """The relayed blocks that follow a rollout; blocks without a next anchor or without relay are dropped."""
    next_anchor = rollout.anchors + rollout.accept_len + 1  # P'
    keep = (next_anchor < len(tokens) - 1) & (rollout.accept_len < block_size - 1)
    proposals, accept_len, states = rollout.proposals[keep], rollout.accept_len[keep], rollout.states[keep]
    next_anchor = next_anchor[keep]
    positions = next_anchor[:, None] + torch.arange(block_size)  # [A', B]
    source, mask = relay_rows(positions, next_anchor[:, None], accept_len[:, None], block_size=block_size, rule=rule)
    moved = states.gather(1, source[..., None].expand(-1, -1, states.shape[-1]))
    rejected = proposals.gather(1, accept_len[:, None] + 1)[:, 0]
    return Relayed(next_anchor, tokens[next_anchor], rejected, moved, mask)


def relay_embeds(
    drafter: Drafter,
    target: Target,
    plain: torch.Tensor,  # [.., A, B, H] anchor and mask embeddings
    relayed: Relayed,
    detach: bool = True,
) -> torch.Tensor:
    """Input rows with the relay added where ``relayed.mask`` says so."""
    assert drafter.relay is not None
    hidden = drafter.project(relayed.states.to(plain.dtype))  # [.., A, B, H]
    # The states are detached as the method asks; fc and hidden_norm learn from the context rows alone.
    hidden = hidden.detach() if detach else hidden
    bonus, rejected = (target.embed(ids).to(plain.dtype) for ids in (relayed.bonus, relayed.rejected))
    # The relay's master weights are float32: autocast runs its products in bf16, its norm in float32.
    with torch.autocast("cpu", torch.bfloat16, enabled=plain.dtype == torch.bfloat16):
        delta = drafter.relay(hidden, bonus, rejected)
    return plain + torch.where(relayed.mask[..., None], delta, 0.0).to(plain.dtype)


def stack_relayed(items: Sequence[Relayed], count: int, generator: torch.Generator) -> tuple[Relayed, torch.Tensor]:
    """``count`` relayed blocks per sequence as one batch [S, count, ..], and which of them are real [S, count]."""
    fields: list[list[torch.Tensor]] = [[] for _ in Relayed._fields]
    real = []
    for item in items:
        available = len(item.anchors)
        order = torch.randperm(max(available, 1), generator=generator)
        pick = order.repeat(-(-count // len(order)))[:count]
        real.append(torch.full((count,), available > 0))
        for values, field in zip(fields, item):
            if available:
                values.append(field[pick])
            else:
                values.append(field.new_zeros((count, *field.shape[1:])))
    return Relayed(*(torch.stack(values) for values in fields)), torch.stack(real)


__all__ = [
    "Batch", "ContextKV", "Relayed", "Rollout", "accepted", "make_rollout", "next_round", "packed_attend", "propose",
    "relay_embeds", "stack_relayed", "verification_mask", "verify_packed",
]  # fmt: skip
