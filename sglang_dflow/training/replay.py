"""Offline acceptance: speculation over the target's own text replayed exactly, in plain torch, at any temperature.

Greedy speculation commits the target's own text whatever is drafted. So the text is made once, and a replay walks over
it: draft at the anchor, count the drafts equal to the text, move the anchor. Without the relay a replay needs no target
at all; with it, the target verifies every block for the states of the rejected rows.

The same walk is exact at temperature > 0, over text *sampled* from the target. Drafts of this family are point masses,
and speculative sampling (see ``cpu/sampling.py``) accepts a draft ``d`` with probability ``p(d)``, else commits a
sample of ``p`` without ``d``. Drawing ``x`` from ``p`` first and accepting ``d`` if ``x == d`` is that rule: it
accepts with probability ``p(d)``, and given a rejection ``x`` is distributed as ``p`` without ``d``. The committed
text is then a plain sample of the target, drawn without looking at any draft; so it is drawn once, and every drafter,
relay on and off, is measured on the same text. (It must be drawn from all of ``p``: see ``answers.py``.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from sglang_dflow.relay.alignment import RelayRule, RelaySource, relay_rows
from sglang_dflow.relay.rescore import Look, proposals_by_row
from sglang_dflow.training.acceptance import Acceptance, Outcome
from sglang_dflow.training.dataset import Batch, Sample, collate
from sglang_dflow.training.drafter import Drafter
from sglang_dflow.training.rollout import (
    PackedStates,
    Relayed,
    accepted,
    draft_tokens,
    greedy_tokens,
    relay_embeds,
    second_look,
    token_codes,
)
from sglang_dflow.training.target import Attend, Target, TargetShape

# Dimensions: S conversations, S' of them still running, T context rows, B block size, m captured layers.


@torch.no_grad()
def replay(
    drafter: Drafter,
    target: Target,
    samples: Sequence[Sample],
    relay: bool = False,
    batch_size: int = 32,
    observe: Observe | None = None,
) -> Acceptance:
    """Replay speculation over the samples' answers, all conversations of a batch in lockstep.

    ``observe`` is told of every round what the drafter's rescorer sees.

    The first answer token is the first anchor: it comes from the prefill and counts for no verification. An answer of
    one token has no round.

    Raises:
        ValueError: ``relay`` with a drafter that has none, or no samples.
    """
    if relay and drafter.relay is None:
        raise ValueError("this drafter has no relay (relay_hidden_size 0); expected a DFlow drafter: convert it first.")
    if not samples:
        raise ValueError("no conversations to replay; expected at least one.")
    # The weights as they are served, and cast once instead of once a round.
    drafter = copy.deepcopy(drafter).to(target.dtype)
    counts = _Counts([], [[0] * drafter.config.block_size for _ in samples], [0] * len(samples))
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].tokens))  # similar lengths together
    for start in range(0, len(order), batch_size):
        _replay_batch(drafter, target, samples, order[start : start + batch_size], relay, counts, observe)
    outcomes = [
        Outcome(sample.id, tokens, sum(histogram), tuple(histogram))
        for sample, tokens, histogram in zip(samples, counts.tokens, counts.histograms)
    ]
    rounds = sum(outcome.rounds for outcome in outcomes)
    return Acceptance(
        outcomes=tuple(outcomes),
        block_size=drafter.config.block_size,
        relayed_rows=sum(counts.relayed),
        mask_rows=rounds * (drafter.config.block_size - 1),
        relayed_rounds=sum(rows > 0 for rows in counts.relayed) / max(rounds, 1),
    )


Observe = Callable[[torch.Tensor, Look, torch.Tensor, torch.Tensor], None]
"""Numbers [S'] of the samples, what the rescorer sees, labels [S', B], and which of them exist [S', B]."""


class _Counts(NamedTuple):
    """What the rounds add up to; lists over all samples, filled in place."""

    relayed: list[int]  # relayed rows of every block that was drafted with the relay
    histograms: list[list[int]]  # [samples][B] rounds by number of accepted drafts
    tokens: list[int]  # committed


def _replay_batch(
    drafter: Drafter,
    target: Target,
    samples: Sequence[Sample],
    indices: list[int],
    relay: bool,
    counts: _Counts,
    observe: Observe | None,
) -> None:
    block = drafter.config.block_size
    batch = collate(samples, indices, block, target)
    context = drafter.context(batch.captured.to(target.dtype))
    verifier = _Verifier(target, batch, block) if relay else None
    carry = _Carry(drafter, batch) if relay else None
    anchors, part = batch.prompt_lens.clone(), context  # [S]
    while True:
        rows = torch.nonzero(anchors < batch.lengths - 1).flatten()  # [S'] conversations that still run
        if not len(rows):
            return
        at = anchors[rows]
        anchor_ids = batch.tokens[rows, at]
        embeds = drafter.plain_embeds(target, anchor_ids[:, None], target.dtype)  # [S', 1, B, H]
        relayed = None
        if carry is not None:
            relayed = carry.relayed(rows, at, anchor_ids)
            counts.relayed.extend(relayed.mask.sum((1, 2)).tolist())
            embeds = relay_embeds(drafter, target, embeds, relayed)
        if len(rows) != len(part.kv[0].key):  # conversations only ever leave: same number, same rows
            part = context._replace(kv=[type(kv)(kv.key[rows], kv.value[rows]) for kv in context.kv])
        positions = at[:, None] + torch.arange(block)
        valid = positions < batch.lengths[rows, None]
        labels = batch.tokens[rows].gather(1, positions.clamp_max(batch.tokens.shape[1] - 1))
        hidden = drafter(embeds, at[:, None], part)  # [S', 1, B, H]
        if relayed is not None and drafter.rescorer is not None:
            look = second_look(target, hidden, relayed, drafter.rescorer.top_k)
            if observe is not None:
                observe(torch.tensor([indices[row] for row in rows.tolist()]), look, labels, valid)
            drafts = drafter.rescorer.choose(look, token_codes(drafter.rescorer, target))  # [S', B - 1]
        else:
            drafts = draft_tokens(drafter, target, hidden, anchor_ids[:, None])[:, 0]
        blocks = torch.cat([anchor_ids[:, None], drafts], dim=1)  # [S', B]
        accept_len = accepted(blocks, labels, valid)  # [S']
        for row, a, left in zip(rows.tolist(), accept_len.tolist(), (batch.lengths[rows] - 1 - at).tolist()):
            counts.histograms[indices[row]][a] += 1
            counts.tokens[indices[row]] += min(a + 1, left)  # the last round's bonus may lie behind the end
        if carry is not None and verifier is not None:
            carry.store(rows, at, blocks, accept_len, verifier.verify(rows, at, blocks, carry.stale_token))
        anchors[rows] = at + accept_len + 1


class _Carry:
    """What the relay keeps of each conversation between two rounds."""

    def __init__(self, drafter: Drafter, batch: Batch) -> None:
        assert drafter.relay is not None
        config, count = drafter.config, len(batch.tokens)
        self.stale_token = drafter.relay.stale_token
        self.rule = RelayRule.of(RelaySource(config.relay_source), shift_label=config.shift_label)
        self.next_prefix_len = torch.full((count, 1), -1)  # nothing relayed before the first round
        self.accept_len = torch.zeros(count, 1, dtype=torch.int64)
        self.rejected = torch.zeros(count, dtype=torch.int64)
        self.stale = torch.zeros(count, config.block_size, dtype=torch.int64)
        self.blocks = torch.zeros(count, config.block_size, dtype=torch.int64)
        self.states = batch.captured.new_zeros(count, config.block_size, batch.captured.shape[-1])  # [S, B, m * H]

    def relayed(self, rows: torch.Tensor, anchors: torch.Tensor, bonus: torch.Tensor) -> Relayed:
        """The relay for blocks at ``anchors`` [S'] of the conversations ``rows``, as [S', 1, ..]."""
        block = self.states.shape[1]
        source, mask = relay_rows(
            anchors[:, None] + torch.arange(block), self.next_prefix_len[rows], self.accept_len[rows],
            block_size=block, rule=self.rule,
        )  # fmt: skip
        states = self.states[rows].gather(1, source[..., None].expand(-1, -1, self.states.shape[-1]))
        return Relayed(
            anchors=anchors[:, None],
            bonus=bonus[:, None],
            rejected=self.rejected[rows, None],
            states=states[:, None],
            stale=self.stale[rows].gather(1, source)[:, None],
            mask=mask[:, None],
            proposed=proposals_by_row(self.blocks[rows], source, mask)[:, None],
        )

    def store(
        self,
        rows: torch.Tensor,  # [S']
        anchors: torch.Tensor,  # [S']
        blocks: torch.Tensor,  # [S', B]
        accept_len: torch.Tensor,  # [S']
        verified: PackedStates,  # of [S', B]
    ) -> None:
        """Remember a verified round."""
        self.states[rows] = verified.captured.to(self.states.dtype)
        self.stale[rows] = verified.top1
        self.blocks[rows] = blocks
        self.next_prefix_len[rows, 0] = anchors + accept_len + 1
        self.accept_len[rows, 0] = accept_len
        # On full acceptance nothing was rejected and nothing will be relayed: any drafted token does.
        boundary = (accept_len[:, None] + 1).clamp_max(blocks.shape[1] - 1)
        self.rejected[rows] = blocks.gather(1, boundary)[:, 0]


class _Verifier:
    """The target behind the K/V of its own text: verifies blocks without a forward over the context.

    Every layer's K/V end in B rows for the block at hand, written anew each round, so that no round copies the context;
    conversations that have ended are dropped.
    """

    def __init__(self, target: Target, batch: Batch, block_size: int) -> None:
        self.target = target
        self.rows = torch.arange(len(batch.tokens))  # [S'] conversations that the K/V belong to
        self.length = batch.captured.shape[1]  # T
        self.keys: list[torch.Tensor] = []  # [S', Hkv, T + B, D] per layer
        self.values: list[torch.Tensor] = []
        visible = torch.ones(self.length, self.length, dtype=torch.bool).tril()
        bias = _additive(visible[None], target.shape, target.dtype)

        def attend(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            self.keys.append(F.pad(k, (0, 0, 0, block_size)))
            self.values.append(F.pad(v, (0, 0, 0, block_size)))
            return _grouped_attention(target.shape, q, k, v, bias)

        positions = torch.arange(self.length).expand(len(batch.tokens), -1)
        target.forward(batch.tokens[:, : self.length], positions, attend)

    def verify(
        self,
        rows: torch.Tensor,  # [S'] conversations; only ever fewer than in the round before
        anchors: torch.Tensor,  # [S']
        blocks: torch.Tensor,  # [S', B]
        with_top1: bool,
    ) -> PackedStates:
        """States [S', B, m * H] and, if asked for, top-1 tokens [S', B] of the blocks' rows."""
        if len(rows) != len(self.rows):
            kept = torch.isin(self.rows, rows)
            self.rows = rows
            self.keys, self.values = [k[kept] for k in self.keys], [v[kept] for v in self.values]
        block = blocks.shape[1]
        before = (torch.arange(self.length) < anchors[:, None])[:, None].expand(-1, block, -1)  # [S', B, T]
        own = torch.ones(block, block, dtype=torch.bool).tril().expand(len(rows), -1, -1)
        bias = _additive(torch.cat([before, own], dim=-1), self.target.shape, self.target.dtype)
        positions = anchors[:, None] + torch.arange(block)
        hidden, captured = self.target.forward(blocks, positions, self._attend(bias), capture=True)
        assert captured is not None
        top1 = greedy_tokens(self.target, hidden) if with_top1 else torch.zeros_like(blocks)
        return PackedStates(captured, top1)

    def _attend(self, bias: torch.Tensor) -> Attend:
        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            key, value = self.keys[layer], self.values[layer]
            key[:, :, self.length :] = k.transpose(1, 2)
            value[:, :, self.length :] = v.transpose(1, 2)
            return _grouped_attention(self.target.shape, q, key, value, bias)

        return attend


def _additive(visible: torch.Tensor, shape: TargetShape, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [S, 1, groups * Q, K] of visible [S, Q, K]."""
    bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
    return bias.repeat(1, shape.num_heads // shape.num_kv_heads, 1)[:, None]


def _grouped_attention(
    shape: TargetShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """q [S, Q, Hq, D], k and v [S, Hkv, K, D], bias [S, 1, groups * Q, K] -> [S, Q, Hq D]."""
    groups, rows = shape.num_heads // shape.num_kv_heads, q.shape[1]
    q = q.unflatten(2, (shape.num_kv_heads, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return out.unflatten(2, (groups, rows)).permute(0, 3, 1, 2, 4).flatten(2)
