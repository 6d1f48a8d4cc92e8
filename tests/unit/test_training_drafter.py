"""Packed blocks, rollouts and replay on a toy target."""

from __future__ import annotations

import torch

from sglang_dflow.relay.alignment import RelayRule, RelaySource
from sglang_dflow.training.dataset import Sample, collate
from sglang_dflow.training.drafter import Drafter
from sglang_dflow.training.generate import generate_batch, loop_start
from sglang_dflow.training.replay import replay
from sglang_dflow.training.rollout import PackedVerifier, judge, make_rollout, next_round
from sglang_dflow.training.target import Target, causal_attend
from tests.unit.training_toys import toy_drafter, toy_samples, toy_target, trajectory_of


def _blocks(drafter: Drafter, target: Target, sample: Sample, anchors: list[int]) -> torch.Tensor:
    batch = collate([sample], [0], drafter.config.block_size)
    at = torch.tensor([anchors])
    embeds = drafter.plain_embeds(target, batch.tokens.gather(1, at), torch.float32)
    return drafter(embeds, at, drafter.context(batch.captured.float()))[0]


def test_packed_block_sees_only_the_context_before_its_anchor() -> None:
    """Catches a block that reads the captured state at its own anchor or behind it: the future leaks."""
    target = toy_target()
    drafter, sample = toy_drafter(target), toy_samples(target, 1)[0]
    anchor = sample.prompt_len + 3
    before = _blocks(drafter, target, sample, [anchor])
    future = sample.states.clone()
    future[anchor:] = 7.0
    assert torch.equal(before, _blocks(drafter, target, sample._replace(states=future), [anchor]))
    past = sample.states.clone()
    past[anchor - 1] = 7.0
    assert not torch.allclose(before, _blocks(drafter, target, sample._replace(states=past), [anchor]))


def test_packed_blocks_do_not_see_each_other() -> None:
    """Catches attention between blocks that share one forward."""
    target = toy_target()
    drafter, sample = toy_drafter(target), toy_samples(target, 1)[0]
    first, second = sample.prompt_len, sample.prompt_len + 2
    together = _blocks(drafter, target, sample, [first, second])
    for row, anchor in enumerate((first, second)):
        assert torch.allclose(together[row], _blocks(drafter, target, sample, [anchor])[0], atol=1e-5)


def test_block_rows_attend_both_ways_within_the_block() -> None:
    """Catches a causal block: the last row's input must change the first row's output."""
    target = toy_target()
    drafter, sample = toy_drafter(target), toy_samples(target, 1)[0]
    batch, at = collate([sample], [0], drafter.config.block_size), torch.tensor([[sample.prompt_len]])
    context = drafter.context(batch.captured.float())
    embeds = drafter.plain_embeds(target, batch.tokens.gather(1, at), torch.float32)
    changed = embeds.clone()
    changed[0, 0, -1] += 1.0
    assert not torch.allclose(drafter(embeds, at, context)[0, 0, 0], drafter(changed, at, context)[0, 0, 0])


def test_captured_states_match_transformers() -> None:
    """Catches an off-by-one in the captured layers: layer i is hidden_states[i + 1] of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=60, max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    target = Target.from_transformers(model, [2, 0])
    ids = torch.randint(0, 60, (2, 11))
    with torch.no_grad():
        expected = model(input_ids=ids, output_hidden_states=True)
        got = target.forward(ids, torch.arange(11).expand(2, -1), causal_attend(target.shape), capture=True)
    assert torch.allclose(target.logits(got.hidden), expected.logits, atol=1e-5)
    states = torch.cat([expected.hidden_states[3], expected.hidden_states[1]], dim=-1)
    assert got.captured is not None and torch.allclose(got.captured, states, atol=1e-5)


def test_generation_is_greedy_and_its_states_are_those_of_the_text() -> None:
    """Catches errors of left padding, compaction and the state buffer."""
    target = toy_target()
    prompts = [[3, 4, 5], [6, 7, 8, 9, 10], [11]]
    for prompt, (tokens, _, states) in zip(prompts, generate_batch(target, prompts, 12, cut_loops=False, capture=True)):
        assert tokens == trajectory_of(target, prompt, len(tokens))
        ids = torch.tensor([prompt + tokens])
        full = target.forward(ids, torch.arange(ids.shape[1])[None], causal_attend(target.shape), capture=True)
        assert states is not None and full.captured is not None
        assert torch.allclose(states, full.captured[0, :-1], atol=1e-5)


def test_packed_verification_equals_one_block_at_a_time() -> None:
    """Catches a verified row that sees its own future, another block, or the text at its anchor and behind."""
    target = toy_target()
    sample = toy_samples(target, 1)[0]
    anchors = torch.tensor([sample.prompt_len, sample.prompt_len + 4, sample.prompt_len + 1])
    proposals = torch.randint(3, 30, (3, 4))
    packed = PackedVerifier(target, sample.tokens).verify(anchors, proposals, with_top1=True)
    for row, anchor in enumerate(anchors.tolist()):
        ids = torch.cat([sample.tokens[:anchor], proposals[row]])[None]
        alone = target.forward(ids, torch.arange(ids.shape[1])[None], causal_attend(target.shape), capture=True)
        assert alone.captured is not None
        assert torch.allclose(packed.captured[row], alone.captured[0, anchor:], atol=1e-5)
        assert torch.equal(packed.top1[row], target.logits(alone.hidden[0, anchor:]).argmax(-1))


def test_rollout_boundary_and_next_round() -> None:
    """Catches a wrong boundary: accepted drafts equal the text, the rejected one does not, and the relayed state of
    row t of the next block is that of row t + a of the verified one."""
    target = toy_target()
    drafter, sample = toy_drafter(target), toy_samples(target, 1)[0]
    block = drafter.config.block_size
    anchors = torch.arange(sample.prompt_len, sample.prompt_len + 6)
    noise = torch.randint(3, 30, (6, block), generator=torch.Generator().manual_seed(0))
    text = sample.tokens[anchors[:, None] + torch.arange(block)]
    # The first n rows of block n are right, so that every accepted length occurs.
    blocks = torch.where(torch.arange(block) <= torch.arange(6)[:, None], text, noise)
    verifier = PackedVerifier(target, sample.tokens)
    rollout = judge(toy_drafter(target, relay_hidden_size=8), verifier, sample.tokens, anchors, blocks)
    for anchor, proposals, a in zip(rollout.anchors.tolist(), rollout.proposals, rollout.accept_len.tolist()):
        text = sample.tokens[anchor : anchor + block]
        assert torch.equal(proposals[: a + 1], text[: a + 1])
        assert a == block - 1 or a + 1 >= len(text) or proposals[a + 1] != text[a + 1]
    rule = RelayRule.of(RelaySource.FIRST_REJECTION, shift_label=False)
    relayed = next_round(rollout, sample.tokens, rule, block)
    assert len(relayed.anchors)
    for i, anchor in enumerate(relayed.anchors.tolist()):
        origin = next(n for n in range(len(rollout.anchors)) if _follows(rollout, n, anchor, relayed.rejected[i]))
        a = int(rollout.accept_len[origin])
        assert relayed.bonus[i] == sample.tokens[anchor]
        assert relayed.mask[i].tolist() == [1 <= t <= block - 1 - a for t in range(block)]
        for t in range(1, block - a):
            assert torch.equal(relayed.states[i, t], rollout.states[origin, t + a])
    assert set(rollout.accept_len.tolist()) >= {0, 1, 2, 3}
    generator = torch.Generator().manual_seed(0)
    chain = make_rollout(drafter, target, sample, 6, 3, rule, generator, relay=False)
    counts = [len(item.anchors) for item in chain]
    assert len(counts) > 1 and counts == sorted(counts, reverse=True)


def _follows(rollout: object, n: int, anchor: int, rejected: torch.Tensor) -> bool:
    a = int(rollout.accept_len[n])  # type: ignore[attr-defined]
    return int(rollout.anchors[n]) + a + 1 == anchor and bool(  # type: ignore[attr-defined]
        rollout.proposals[n, a + 1] == rejected  # type: ignore[attr-defined]
    )


def test_replay_equals_a_plain_speculation_loop() -> None:
    """Catches batching errors of the replay: compared with one conversation at a time, written out."""
    target = toy_target()
    drafter, samples = toy_drafter(target), toy_samples(target, 5)
    rounds = committed = 0
    for sample in samples:
        anchor = sample.prompt_len
        while anchor < len(sample.tokens) - 1:
            hidden = _blocks(drafter, target, sample, [anchor])[0, 1:]
            drafts = target.logits(hidden).argmax(-1)
            text = sample.tokens[anchor + 1 : anchor + drafter.config.block_size]
            wrong = [i for i in range(len(text)) if drafts[i] != text[i]]
            a = wrong[0] if wrong else len(text)
            committed += min(a + 1, len(sample.tokens) - 1 - anchor)
            rounds += 1
            anchor += a + 1
    result = replay(drafter, target, samples, batch_size=3)
    assert result.rounds == rounds
    assert abs(result.tau - committed / rounds) < 1e-9


def test_zero_relay_changes_nothing_and_a_loud_one_does() -> None:
    """Catches a relay that is not wired in, or that is not silent at initialisation."""
    target = toy_target()
    drafter, samples = toy_drafter(target, relay_hidden_size=6), toy_samples(target, 4)
    off, on = replay(drafter, target, samples), replay(drafter, target, samples, relay=True)
    assert (off.tau, off.rounds) == (on.tau, on.rounds)
    assert on.relayed_rounds > 0.5
    assert drafter.relay is not None
    torch.nn.init.normal_(drafter.relay.relay_mlp[2].bias, std=20.0)
    assert replay(drafter, target, samples, relay=True).by_depth != off.by_depth
    assert replay(drafter, target, samples).by_depth == off.by_depth


def test_loops_are_cut_behind_the_first_period() -> None:
    """Catches answers whose repetition would inflate acceptance."""
    assert loop_start(list(range(40))) is None
    assert loop_start([1, 2, 3] + [7, 8] * 12) == 5
    assert loop_start([1, 2, 3] + [7, 8] * 4) is None  # too short to be called a loop
    assert loop_start([9] * 30) == 1
