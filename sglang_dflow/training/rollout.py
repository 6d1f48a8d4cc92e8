"""Rollouts: a drafter's own proposals, judged by the frozen target, with the states of every proposed row.

Owns the packed verification (one target forward per sequence over its text and one per round over all blocks at once;
block rows see the text strictly before their anchor and, causally, their own block) and the chain of rounds: the first
mismatch with the trajectory, which is the target's own text, fixes the next anchor, and the next round drafts
from it with the relayed states of the actual proposals. Used by training, by evaluation and by tests.

Rollouts are made once per refresh and read from memory-mapped files (B * m * H bf16 values a block), since a target
pass costs several drafter steps: relayed states are those of the drafter that made them, up to one refresh old.

Dimensions: S sequences, A blocks per sequence, B block size, m captured layers, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_dflow.relay.alignment import RelayRule, relay_rows
from sglang_dflow.relay.rescore import (
    NONE,
    Evidence,
    Look,
    RelayRescorer,
    TokenCodes,
    candidates,
    proposals_by_row,
)
from sglang_dflow.training.dataset import Sample, collate, labels_at, sample_anchors
from sglang_dflow.training.drafter import Context, Drafter
from sglang_dflow.training.loss import full_vocabulary
from sglang_dflow.training.target import Attend, Target, causal_attend


class Verified(NamedTuple):
    """Blocks that went through the target."""

    anchors: torch.Tensor  # [A] P
    proposals: torch.Tensor  # [A, B] row 0 the anchor token, rows 1.. the drafter's greedy proposals
    accept_len: torch.Tensor  # [A] a
    states: torch.Tensor  # [A, B, m * H] captured states of the proposed rows
    stale: torch.Tensor  # [A, B] the target's own top-1 token at every proposed row; zeros where not asked for


class Relayed(NamedTuple):
    """What the next round of some blocks takes from the verified one."""

    anchors: torch.Tensor  # [.., A] P'
    bonus: torch.Tensor  # [.., A] token at P'
    rejected: torch.Tensor  # [.., A] d_{a+1}
    states: torch.Tensor  # [.., A, B, m * H] states moved to the rows of the next block
    stale: torch.Tensor  # [.., A, B] the target's top-1 token at each source row
    mask: torch.Tensor  # [.., A, B] rows that take a relay
    proposed: torch.Tensor  # [.., A, B] what the verified block had proposed for each row's position; `NONE`: nothing


def accepted(proposals: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Accepted drafts a [..]: the longest prefix of rows 1.. equal to the trajectory; all arguments [.., B]."""
    match = (proposals[..., 1:] == labels[..., 1:]) & valid[..., 1:]
    return match.long().cumprod(-1).sum(-1)


class PackedStates(NamedTuple):
    """What one packed verification tells of every proposed row."""

    captured: torch.Tensor  # [A, B, m * H]
    top1: torch.Tensor  # [A, B] the target's own next token; zeros unless asked for


class PackedVerifier:
    """The target behind the K/V of one trajectory: verifies many blocks of it in one forward.

    The trajectory goes through the target once, whatever the number of rounds. A block row sees the trajectory strictly
    before its anchor and, causally, its own block; blocks do not see each other, and no score between two is computed.
    """

    def __init__(self, target: Target, tokens: torch.Tensor) -> None:  # tokens: [N]
        self.target = target
        self.keys: list[torch.Tensor] = []  # [Hkv, T, D] per layer, T = N - 1
        self.values: list[torch.Tensor] = []
        causal = causal_attend(target.shape)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.keys.append(k[0].transpose(0, 1).contiguous())
            self.values.append(v[0].transpose(0, 1).contiguous())
            return causal(layer, q, k, v)

        with torch.no_grad():
            target.forward(tokens[None, :-1], torch.arange(len(tokens) - 1)[None], attend)

    @torch.no_grad()
    def verify(self, anchors: torch.Tensor, proposals: torch.Tensor, with_top1: bool = False) -> PackedStates:
        """States of all proposed rows [A, B] at anchors [A]; the head is run only for ``with_top1``."""
        count, block = proposals.shape
        positions = (anchors[:, None] + torch.arange(block)).flatten()
        hidden, captured = self.target.forward(
            proposals.view(1, -1), positions[None], self._attend(anchors, block), capture=True
        )
        assert captured is not None
        top1 = torch.zeros_like(proposals)
        if with_top1:
            top1 = greedy_tokens(self.target, hidden[0]).view(count, block)
        return PackedStates(captured[0].view(count, block, -1), top1)

    def _attend(self, anchors: torch.Tensor, block: int) -> Attend:
        shape, count, context = self.target.shape, len(anchors), self.keys[0].shape[1]
        groups = shape.num_heads // shape.num_kv_heads
        hidden_context = (torch.arange(context) >= anchors[:, None])[:, None, None]  # [A, 1, 1, T]
        hidden_own = torch.ones(block, block, dtype=torch.bool).triu(1)  # [B, B]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q = q.view(count, block, shape.num_kv_heads, groups, -1).permute(2, 0, 3, 1, 4) * shape.head_dim**-0.5
            k, v = (t.view(count, block, shape.num_kv_heads, -1).permute(2, 0, 1, 3) for t in (k, v))  # [Hkv, A, B, D]
            rows = q.flatten(1, 3)  # [Hkv, A * groups * B, D]
            before = (rows @ self.keys[layer].mT).view(shape.num_kv_heads, count, groups, block, context)
            own = (q.flatten(2, 3) @ k.mT).unflatten(2, (groups, block))  # [Hkv, A, groups, B, B]
            scores = torch.cat(
                [before.masked_fill(hidden_context, float("-inf")), own.masked_fill(hidden_own, float("-inf"))], dim=-1
            )
            weights = scores.float().softmax(-1).to(q.dtype)  # [Hkv, A, groups, B, T + B]
            before, own = weights.split([context, block], dim=-1)
            out = (before.flatten(1, 3) @ self.values[layer]).view(q.shape)
            out = out + (own.flatten(2, 3) @ v).view(q.shape)  # [Hkv, A, groups, B, D]
            return out.permute(1, 3, 0, 2, 4).reshape(1, count * block, -1)  # [1, A * B, Hq D]

        return attend


@torch.no_grad()
def greedy_tokens(target: Target, hidden: torch.Tensor) -> torch.Tensor:
    """Top-1 tokens [..] under the target's head for hidden states [.., H], a few rows of logits at a time."""
    # Two-dimensional rows: a strided 4-d input makes torch multiply block by block, each reading the whole head.
    rows = hidden.reshape(-1, hidden.shape[-1]).to(target.dtype)
    return torch.cat([target.logits(part).argmax(-1) for part in rows.split(128)]).view(hidden.shape[:-1])


@torch.no_grad()
def propose(
    drafter: Drafter,
    target: Target,
    embeds: torch.Tensor,  # [S, A, B, H] input rows
    anchors: torch.Tensor,  # [S, A]
    context: Context,
    anchor_ids: torch.Tensor,  # [S, A]
    truth: torch.Tensor | None = None,  # [S, A, B] trajectory tokens: a Domino head is teacher-forced with them
    relayed: Relayed | None = None,  # [S, A, ..] what a rescorer may look at
) -> torch.Tensor:
    """Greedy proposals [S, A, B - 1] of a block, over the full vocabulary; rescored where the drafter does so."""
    hidden = drafter(embeds, anchors, context)
    if relayed is None or drafter.rescorer is None:
        return draft_tokens(drafter, target, hidden, anchor_ids, truth)
    look = second_look(target, hidden, relayed, drafter.rescorer.top_k)
    return drafter.rescorer.choose(look, token_codes(drafter.rescorer, target)).view(*anchor_ids.shape, -1)


@torch.no_grad()
def draft_tokens(
    drafter: Drafter,
    target: Target,
    hidden: torch.Tensor,  # [S, A, B, H] final hidden states
    anchor_ids: torch.Tensor,  # [S, A]
    truth: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the head drafts from a block's states, [S, A, B - 1]; arguments of `propose`."""
    head = drafter.domino
    if head is None:
        return greedy_tokens(target, hidden[:, :, 1:])
    rows, vocabulary = hidden.flatten(0, 1), full_vocabulary(target.head)
    if truth is None:
        drafts = head.rollout(rows, anchor_ids.flatten(), target.embedding, vocabulary)
    else:
        drafts = head.teacher_forced(rows, truth.flatten(0, 1), target.embedding, vocabulary)
    return drafts.view(*anchor_ids.shape, -1)


@torch.no_grad()
def second_look(target: Target, hidden: torch.Tensor, relayed: Relayed, top_k: int) -> Look:
    """What a rescorer sees of N = S * A blocks with final hidden states [S, A, B, H]."""
    evidence = Evidence(
        stale=torch.where(relayed.mask, relayed.stale, NONE)[..., 1:].flatten(0, 1),
        bonus=relayed.bonus.flatten(),
        rejected=relayed.rejected.flatten(),
        proposed=relayed.proposed[..., 1:].flatten(0, 1),
    )
    drafted = hidden[..., 1:, :].flatten(0, 1)  # [N, B - 1, H]
    rows = drafted.flatten(0, 1).to(target.dtype)
    best = [target.logits(part).topk(top_k) for part in rows.split(128)]
    shape = (*evidence.stale.shape, top_k)
    tokens = candidates(torch.cat([part.indices for part in best]).view(shape), evidence.stale)
    stale_rows = target.head[tokens[..., top_k:].clamp_min(0)].float()  # [N, B - 1, 3, H]
    stale_logits = (stale_rows @ drafted.float().unsqueeze(-1)).squeeze(-1)
    logits = torch.cat((torch.cat([part.values.float() for part in best]).view(shape), stale_logits), dim=-1)
    return Look(tokens, logits, drafted, evidence)


def token_codes(rescorer: RelayRescorer, target: Target) -> TokenCodes:
    """A rescorer's codes of the target's tokens; differentiable."""
    return lambda tokens: rescorer.codes(target.embedding[tokens.clamp_min(0)])


def make_rollout(
    drafter: Drafter,
    target: Target,
    sample: Sample,
    count: int,
    rounds: int,
    rule: RelayRule,
    generator: torch.Generator,
    relay: bool = True,
    teacher_forced: bool = False,
) -> list[Relayed]:
    """Draft and verify ``count`` blocks of one sequence and follow each for ``rounds`` rounds.

    Item r of the result is what round r + 1 drafts from. Blocks whose round leaves no next anchor or no relayed row
    drop out, so later items may be shorter; the list ends early when none is left. ``relay=False`` drafts every round
    from plain masks (self-conditioning). ``teacher_forced`` lets a Domino head read the trajectory instead of its own
    proposals, which is what its loss does and what serving never does: the paper's ablation without online rollout.
    """
    block = drafter.config.block_size
    batch = collate([sample], [0], block, target)
    anchors = sample_anchors(batch, count, generator).unique(dim=1)  # [1, A]
    with torch.no_grad():
        context = drafter.context(batch.captured.to(target.dtype))
    verifier = PackedVerifier(target, sample.tokens)
    chain: list[Relayed] = []
    for _ in range(rounds):
        anchor_ids = batch.tokens.gather(1, anchors)
        embeds = drafter.plain_embeds(target, anchor_ids, target.dtype)
        relayed = Relayed(*(field[None] for field in chain[-1])) if chain and relay else None
        if relayed is not None:
            with torch.no_grad():
                embeds = relay_embeds(drafter, target, embeds, relayed)
        truth = labels_at(batch, anchors, block).tokens if teacher_forced else None
        drafts = propose(drafter, target, embeds, anchors, context, anchor_ids, truth, relayed)
        verified = judge(
            drafter, verifier, sample.tokens, anchors[0], torch.cat([anchor_ids[..., None], drafts], -1)[0]
        )
        item = next_round(verified, sample.tokens, rule, block)
        if not len(item.anchors):
            break
        chain.append(item)
        anchors = item.anchors[None]
    return chain


def judge(
    drafter: Drafter, verifier: PackedVerifier, tokens: torch.Tensor, anchors: torch.Tensor, proposals: torch.Tensor
) -> Verified:
    """Verify proposals [A, B] at anchors [A] against the trajectory ``tokens`` [N]."""
    positions = anchors[:, None] + torch.arange(proposals.shape[1])
    labels = tokens[positions.clamp_max(len(tokens) - 1)]
    accept_len = accepted(proposals, labels, positions < len(tokens))
    stale_token = drafter.relay is not None and drafter.relay.stale_token
    states, top1 = verifier.verify(anchors, proposals, with_top1=stale_token)
    return Verified(anchors, proposals, accept_len, states, top1)


def next_round(verified: Verified, tokens: torch.Tensor, rule: RelayRule, block_size: int) -> Relayed:
    """The relayed blocks that follow verified ones; blocks without a next anchor or without relay are dropped."""
    next_anchor = verified.anchors + verified.accept_len + 1  # P'
    keep = (next_anchor < len(tokens) - 1) & (verified.accept_len < block_size - 1)
    _, proposals, accept_len, states, stale = (field[keep] for field in verified)
    next_anchor = next_anchor[keep]
    positions = next_anchor[:, None] + torch.arange(block_size)  # [A', B]
    source, mask = relay_rows(positions, next_anchor[:, None], accept_len[:, None], block_size=block_size, rule=rule)
    return Relayed(
        anchors=next_anchor,
        bonus=tokens[next_anchor],
        rejected=proposals.gather(1, accept_len[:, None] + 1)[:, 0],
        states=states.gather(1, source[..., None].expand(-1, -1, states.shape[-1])),
        stale=stale.gather(1, source),
        mask=mask,
        proposed=proposals_by_row(proposals, source, mask),
    )


def relay_embeds(
    drafter: Drafter,
    target: Target,
    plain: torch.Tensor,  # [.., A, B, H] anchor and mask embeddings
    relayed: Relayed,
    detach: bool = True,
    without: Sequence[str] = (),
) -> torch.Tensor:
    """Input rows [.., A, B, H] with the relay added where ``relayed.mask`` says so.

    ``detach`` keeps ``fc`` and ``hidden_norm`` learning from the context rows alone, as the method asks; ``without``
    names boundary tokens ("bonus", "rejected") that are read as zeros, an ablation.
    """
    assert drafter.relay is not None
    hidden = drafter.project(relayed.states.to(plain.dtype))  # [.., A, B, H]
    hidden = hidden.detach() if detach else hidden
    ids = (relayed.bonus, relayed.rejected, relayed.stale)
    bonus, rejected, stale = (target.embed(part).to(plain.dtype) for part in ids)
    bonus = torch.zeros_like(bonus) if "bonus" in without else bonus
    rejected = torch.zeros_like(rejected) if "rejected" in without else rejected
    # The relay's master weights are float32: autocast runs its products in bf16, its norm in float32.
    with torch.autocast(plain.device.type, torch.bfloat16, enabled=plain.dtype == torch.bfloat16):
        delta = drafter.relay(hidden, bonus, rejected, stale if drafter.relay.stale_token else None)
    return plain + torch.where(relayed.mask[..., None], delta, 0.0).to(plain.dtype)


def stack_relayed(
    items: Sequence[Relayed | None], count: int, generator: torch.Generator
) -> tuple[Relayed, torch.Tensor]:
    """``count`` relayed blocks per sequence as one batch [S, count, ..], and which of them are real [S, count].

    A sequence without blocks (None) is padded with zeros; at least one item must hold blocks.
    """
    shapes = next(item for item in items if item is not None)
    fields: list[list[torch.Tensor]] = [[] for _ in Relayed._fields]
    real = []
    for item in items:
        available = 0 if item is None else len(item.anchors)
        order = torch.randperm(max(available, 1), generator=generator, device="cpu")
        pick = order.repeat(-(-count // len(order)))[:count]
        real.append(torch.full((count,), available > 0))
        for index, values in enumerate(fields):
            if item is not None and available:
                values.append(item[index][pick])
            else:
                values.append(shapes[index].new_zeros((count, *shapes[index].shape[1:])))
    return Relayed(*(torch.stack(values) for values in fields)), torch.stack(real)
