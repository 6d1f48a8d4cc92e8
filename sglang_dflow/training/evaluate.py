"""Offline acceptance: greedy speculation replayed exactly, in plain torch.

Greedy speculation commits the target's own text whatever is drafted. So the text is made once, and a replay walks
over it: draft at the anchor, count the drafts equal to the text, move the anchor. tau is committed tokens per
verification, the bonus included. Without the relay a replay needs no target at all; with it, the target verifies
every block for the states of the rejected rows.

Answers that fall into loops are cut (data.py): a loop would inflate tau.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from sglang_dflow.relay.alignment import RelayRule, RelaySource, relay_rows
from sglang_dflow.training.data import Prompt, answer_prompts, chat_ids, read_turns
from sglang_dflow.training.dataset import Batch, Sample, collate, load_sequences
from sglang_dflow.training.drafter import Drafter
from sglang_dflow.training.rollout import Relayed, accepted, propose, relay_embeds
from sglang_dflow.training.target import Attend, Target, TargetShape


class Acceptance(NamedTuple):
    """Outcome of a replay."""

    tau: float  # committed tokens per verification, over all rounds
    rounds: int
    by_depth: list[float]  # share of rounds that accepted at least t drafts, t = 1..B-1
    per_sample: list[float]  # tau of every conversation
    per_sample_rounds: list[int]
    relayed_rounds: float  # share of rounds with at least one relayed row


class _TargetContext(NamedTuple):
    """The target's own K/V of the trajectories, [S, Hkv, T, D] per layer."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def _groups(shape: TargetShape) -> int:
    return shape.num_heads // shape.num_kv_heads


def _grouped_attention(
    shape: TargetShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """q [S, Q, Hq, D], k and v [S, Hkv, K, D], bias [S, 1, groups * Q, K] -> [S, Q, Hq D]."""
    rows = q.shape[1]
    q = q.unflatten(2, (shape.num_kv_heads, _groups(shape))).permute(0, 2, 3, 1, 4).flatten(2, 3)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return out.unflatten(2, (_groups(shape), rows)).permute(0, 3, 1, 2, 4).flatten(2)


@torch.no_grad()
def _target_context(target: Target, batch: Batch) -> _TargetContext:
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    shape, rows = target.shape, batch.captured.shape[1]
    causal = torch.zeros(rows, rows, dtype=target.dtype)
    causal.masked_fill_(torch.ones(rows, rows, dtype=torch.bool).triu(1), float("-inf"))
    bias = causal.repeat(_groups(shape), 1)[None, None]

    def attend(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        keys.append(k)
        values.append(v)
        return _grouped_attention(shape, q, k, v, bias)

    target.forward(batch.tokens[:, :rows], torch.arange(rows).expand(len(batch.tokens), -1), attend)
    return _TargetContext(keys, values)


def _verify_attend(shape: TargetShape, context: _TargetContext, rows: torch.Tensor, bias: torch.Tensor) -> Attend:
    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        key = torch.cat([context.keys[layer][rows], k.transpose(1, 2)], dim=2)
        value = torch.cat([context.values[layer][rows], v.transpose(1, 2)], dim=2)
        return _grouped_attention(shape, q, key, value, bias)

    return attend


@torch.no_grad()
def _verify(
    target: Target, context: _TargetContext, rows: torch.Tensor, anchors: torch.Tensor, blocks: torch.Tensor
) -> torch.Tensor:
    """Captured states [S', B, m * H] of blocks [S', B] at anchors [S'], behind the trajectories ``rows``."""
    length, block = context.keys[0].shape[2], blocks.shape[1]
    before = (torch.arange(length) < anchors[:, None])[:, None].expand(-1, block, -1)  # [S', B, T]
    own = torch.ones(block, block, dtype=torch.bool).tril().expand(len(rows), -1, -1)
    visible = torch.cat([before, own], dim=-1)
    bias = torch.zeros(visible.shape, dtype=target.dtype).masked_fill_(~visible, float("-inf"))
    bias = bias.repeat(1, _groups(target.shape), 1)[:, None]
    positions = anchors[:, None] + torch.arange(block)
    captured = target.forward(
        blocks, positions, _verify_attend(target.shape, context, rows, bias), capture=True
    ).captured
    assert captured is not None
    return captured


class _Carry:
    """What the relay keeps of each conversation between two rounds."""

    def __init__(self, count: int, block: int, features: int, dtype: torch.dtype) -> None:
        self.next_prefix_len = torch.full((count, 1), -1)
        self.accept_len = torch.zeros(count, 1, dtype=torch.int64)
        self.rejected = torch.zeros(count, dtype=torch.int64)
        self.states = torch.zeros(count, block, features, dtype=dtype)

    def relayed(self, rows: torch.Tensor, anchors: torch.Tensor, bonus: torch.Tensor, rule: RelayRule) -> Relayed:
        """The relay for blocks at ``anchors`` [S'] of the conversations ``rows``, as [S', 1, ..]."""
        block = self.states.shape[1]
        source, mask = relay_rows(
            anchors[:, None] + torch.arange(block), self.next_prefix_len[rows], self.accept_len[rows],
            block_size=block, rule=rule,
        )  # fmt: skip
        states = self.states[rows].gather(1, source[..., None].expand(-1, -1, self.states.shape[-1]))
        fields = (anchors, bonus, self.rejected[rows], states, mask)
        return Relayed(*(field[:, None] for field in fields))


@torch.no_grad()
def replay(
    drafter: Drafter,
    target: Target,
    samples: Sequence[Sample],
    relay: bool = False,
    batch_size: int = 32,
) -> Acceptance:
    """Replay greedy speculation over the samples' answers, all conversations of a batch in lockstep."""
    if relay and drafter.relay is None:
        raise ValueError("this drafter has no relay (relay_hidden_size 0); expected a DFlow drafter: convert it first.")
    # The weights as they are served, and cast once instead of once a round.
    drafter = copy.deepcopy(drafter).to(target.dtype)
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].tokens))
    accepts: list[list[int]] = [[] for _ in samples]
    commits = [0] * len(samples)
    relayed_rounds = 0
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        relayed_rounds += _replay_batch(drafter, target, samples, indices, relay, accepts, commits)
    flat = torch.tensor([a for sample in accepts for a in sample])
    depth = [float((flat >= t).float().mean()) for t in range(1, drafter.config.block_size)]
    per_sample = [commits[i] / len(accepts[i]) for i in range(len(samples)) if accepts[i]]
    rounds = [len(sample) for sample in accepts if sample]
    return Acceptance(sum(commits) / len(flat), len(flat), depth, per_sample, rounds, relayed_rounds / len(flat))


def _replay_batch(
    drafter: Drafter,
    target: Target,
    samples: Sequence[Sample],
    indices: list[int],
    relay: bool,
    accepts: list[list[int]],
    commits: list[int],
) -> int:
    block = drafter.config.block_size
    rule = RelayRule.of(RelaySource(drafter.config.relay_source), shift_label=False)
    batch = collate(samples, indices, block)
    context = drafter.context(batch.captured.to(target.dtype))
    target_context = _target_context(target, batch) if relay else None
    carry = _Carry(len(indices), block, batch.captured.shape[-1], batch.captured.dtype) if relay else None
    anchors, relayed_rounds, part = batch.prompt_lens.clone(), 0, context  # [S]
    while True:
        rows = torch.nonzero(anchors < batch.lengths - 1).flatten()  # conversations that still run
        if not len(rows):
            return relayed_rounds
        at = anchors[rows]
        anchor_ids = batch.tokens[rows, at]
        embeds = drafter.plain_embeds(target, anchor_ids[:, None], target.dtype)  # [S', 1, B, H]
        if carry is not None:
            relayed = carry.relayed(rows, at, anchor_ids, rule)
            relayed_rounds += int(relayed.mask.any(-1).sum())
            embeds = relay_embeds(drafter, target, embeds, relayed)
        if len(rows) != len(part.kv[0].key):  # conversations only ever leave: same number, same rows
            part = context._replace(kv=[type(kv)(kv.key[rows], kv.value[rows]) for kv in context.kv])
        drafts = propose(drafter, target, embeds, at[:, None], part)[:, 0]  # [S', B - 1]
        blocks = torch.cat([anchor_ids[:, None], drafts], dim=1)
        positions = at[:, None] + torch.arange(block)
        valid = positions < batch.lengths[rows, None]
        labels = batch.tokens[rows].gather(1, positions.clamp_max(batch.tokens.shape[1] - 1))
        accept_len = accepted(blocks, labels, valid)  # [S']
        for row, a, left in zip(rows.tolist(), accept_len.tolist(), (batch.lengths[rows] - 1 - at).tolist()):
            accepts[indices[row]].append(a)
            commits[indices[row]] += min(a + 1, left)  # the last round's bonus may lie behind the end
        if carry is not None and target_context is not None:
            carry.states[rows] = _verify(target, target_context, rows, at, blocks).to(carry.states.dtype)
            carry.next_prefix_len[rows, 0] = at + accept_len + 1
            carry.accept_len[rows, 0] = accept_len
            carry.rejected[rows] = blocks.gather(1, (accept_len[:, None] + 1).clamp_max(block - 1))[:, 0]
        anchors[rows] = at + accept_len + 1


# --- prompt sets -----------------------------------------------------------------------------------------


def prompt_set_samples(
    target: Target, tokenizer: Any, path: Path, cache: Path, limit: int, max_new_tokens: int, log: Any
) -> list[Sample]:
    """The target's greedy answers to the first turns of a prompt file, cached in ``cache``."""
    cache.mkdir(parents=True, exist_ok=True)
    prompts = [
        Prompt(name, path.stem, chat_ids(tokenizer, [{"role": "user", "content": turns[0]}]))
        for name, turns in read_turns(path)[:limit]
    ]
    answers = cache / f"{path.stem}-{limit}-{max_new_tokens}.jsonl"
    answer_prompts(target, prompts, answers, max_new_tokens, 64, float("inf"), log)
    return load_sequences([answers], target.shape.hidden_size * len(target.target_layer_ids))


def describe(name: str, result: Acceptance) -> str:
    """One table row."""
    spread = torch.tensor(result.per_sample)
    error = float(spread.std() / len(spread) ** 0.5) if len(spread) > 1 else 0.0
    depth = " ".join(f"{share:.2f}" for share in result.by_depth)
    return f"{name:24s} {result.tau:6.3f}  ±{error:.3f}  {len(spread):4d} {result.rounds:7d}  {depth}"


def main(argv: list[str] | None = None) -> int:
    """``sglang-dflow acceptance``: tau per prompt set, relay on and off, then one JSON line."""
    parser = argparse.ArgumentParser(prog="sglang-dflow acceptance", description=main.__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help='JSON lines {"id", "turns"}')
    parser.add_argument("--limit", type=int, default=40, help="prompts per set")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--cache", type=Path, default=Path("runs/eval"), help="where the target's answers are kept")
    parser.add_argument("--relay", choices=["on", "off", "both"], default="both")
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    from transformers import AutoTokenizer

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    drafter = Drafter.load(args.drafter)
    target = Target.load(args.target, torch.bfloat16, drafter.config.target_layer_ids)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    arms = {"on": [True], "off": [False], "both": [False, True]}[args.relay]
    arms = [relay for relay in arms if not relay or drafter.relay is not None]
    record: dict[str, Any] = {"drafter": str(args.drafter), "limit": args.limit, "max_new_tokens": args.max_new_tokens}
    print(f"{'set':24s} {'tau':>6s}  {'s.e.':>6s} {'n':>4s} {'rounds':>7s}  accepted at least 1..B-1 drafts")
    for path in args.prompts:
        samples = prompt_set_samples(target, tokenizer, path, args.cache, args.limit, args.max_new_tokens, log)
        for relay in arms:
            started = time.monotonic()
            result = replay(drafter, target, samples, relay)
            name = f"relay_{'on' if relay else 'off'}"
            print(describe(f"{path.stem} {name}", result), flush=True)
            record.setdefault(name, {})[path.stem] = round(result.tau, 4)
            log(f"acceptance: {path.stem} {name} took {time.monotonic() - started:.0f} s")
    for name in ("relay_off", "relay_on"):
        if name in record:
            record[f"mean_{name}"] = round(sum(record[name].values()) / len(record[name]), 4)
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
