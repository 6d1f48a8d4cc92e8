"""Replay at T = 0 and T > 0 against speculation written out, on a toy target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from sglang_dflow.cpu.sampling import compute_sampled_accept_and_bonus
from sglang_dflow.relay.alignment import RelayRule, RelaySource, relay_rows
from sglang_dflow.relay.rescore import NONE
from sglang_dflow.training.answers import fingerprint, target_answers
from sglang_dflow.training.dataset import Sample
from sglang_dflow.training.drafter import Drafter, DrafterConfig
from sglang_dflow.training.generate import Sampling, generate_batch
from sglang_dflow.training.replay import replay
from sglang_dflow.training.rollout import Relayed, propose, relay_embeds
from sglang_dflow.training.target import Target, causal_attend
from tests.unit.training_toys import toy_drafter, toy_samples, toy_target

TEMPERATURE = 2.0
"""Far enough from 1 that the toy target's text tells the two apart."""


class _Rows(NamedTuple):
    """The target's view of a text, without any cache."""

    logits: torch.Tensor  # [T, V]
    captured: torch.Tensor  # [T, m * H]


@torch.no_grad()
def _run(target: Target, ids: list[int]) -> _Rows:
    batch = torch.tensor([ids])
    out = target.forward(batch, torch.arange(len(ids))[None], causal_attend(target.shape), capture=True)
    assert out.captured is not None
    # Captured states are kept as bf16, as collate keeps them.
    return _Rows(target.logits(out.hidden[0]), out.captured[0].bfloat16())


class _Loop:
    """Speculation on one conversation, written out: no batch, no cache, no replay."""

    def __init__(self, drafter: Drafter, target: Target, prompt: list[int], first: int, relay: bool) -> None:
        self.drafter, self.target, self.relay = drafter, target, relay
        self.text = [*prompt, first]
        self.histogram = [0] * drafter.config.block_size
        self.relayed_rows = 0
        self.previous: tuple[_Rows, list[int], int] | None = None  # rows, block, a of the last round

    @torch.no_grad()
    def draft(self) -> list[int]:
        block, at = self.drafter.config.block_size, len(self.text) - 1
        embeds = self.drafter.plain_embeds(self.target, torch.tensor([[self.text[-1]]]), torch.float32)
        relayed = None
        if self.relay and self.previous is not None:
            rows, last, a = self.previous
            config = self.drafter.config
            rule = RelayRule.of(RelaySource(config.relay_source), shift_label=config.shift_label)
            source, mask = relay_rows(
                torch.arange(at, at + block), torch.tensor([at]), torch.tensor([a]), block_size=block, rule=rule
            )
            self.relayed_rows += int(mask.sum())
            if a < block - 1:
                stale = rows.logits.argmax(-1)[source][None, None]
                tokens = (torch.tensor([[token]]) for token in (at, self.text[-1], last[a + 1]))
                proposed = [last[a + 1 + t] if mask[t] and a + 1 + t < block else NONE for t in range(block)]
                relayed = Relayed(
                    *tokens, rows.captured[source][None, None], stale, mask[None, None], torch.tensor([[proposed]])
                )
                embeds = relay_embeds(self.drafter, self.target, embeds, relayed)
        context = self.drafter.context(_run(self.target, self.text[:-1]).captured.float()[None])
        anchor = torch.tensor([[self.text[-1]]])
        at_anchor = torch.tensor([[at]])
        drafts = propose(self.drafter, self.target, embeds, at_anchor, context, anchor, relayed=relayed)[0, 0].tolist()
        return [self.text[-1], *drafts]

    def commit(self, block: list[int], a: int, bonus: int) -> None:
        logits, captured = _run(self.target, [*self.text[:-1], *block])
        self.previous = (_Rows(logits[len(self.text) - 1 :], captured[len(self.text) - 1 :]), block, a)
        self.histogram[a] += 1
        self.text += [*block[1 : a + 1], bonus]


def _greedy(drafter: Drafter, target: Target, sample: Sample, relay: bool) -> _Loop:
    tokens = sample.tokens.tolist()
    loop = _Loop(drafter, target, tokens[: sample.prompt_len], tokens[sample.prompt_len], relay)
    while len(loop.text) < len(tokens):
        block, rest = loop.draft(), tokens[len(loop.text) :]
        a = next((i for i, (d, t) in enumerate(zip(block[1:], rest)) if d != t), min(len(block) - 1, len(rest)))
        bonus = rest[a] if a < len(rest) else 0
        loop.commit(block, a, bonus)
    return loop


DOMINO = {"projector_type": "domino", "gru_hidden_dim": 6, "emb_dim": 5}
KINDS: dict[str, dict[str, Any]] = {
    "DFlow": {},
    "suffix": {"relay_source": "suffix"},
    "stale token": {"relay_stale_token": True},
    "rescorer": {
        "relay_stale_token": True,
        "relay_rescore_size": 8,
        "relay_rescore_top_k": 3,
        "relay_rescore_code_size": 4,
    },
    "Domino": DOMINO | {"shift_label": False},
    "Domino, shifted": DOMINO | {"shift_label": True},
}


def _loud(target: Target, kind: str) -> Drafter:
    """A drafter whose relay and head change its drafts."""
    torch.manual_seed(1)
    config = DrafterConfig.for_target(
        target, num_hidden_layers=2, block_size=4, mask_token_id=1, relay_hidden_size=6, **KINDS[kind]
    )
    drafter = Drafter(config)
    drafter.init_from_target(target, [2, 3])
    assert drafter.relay is not None
    torch.nn.init.normal_(drafter.relay.relay_mlp[2].weight, std=4.0)
    if drafter.rescorer is not None:
        torch.nn.init.normal_(drafter.rescorer.out.weight, std=40.0)
        torch.nn.init.normal_(drafter.rescorer.gate.weight, std=40.0)
    if drafter.domino is not None:
        torch.nn.init.normal_(drafter.domino.embed_proj[2].weight, std=4.0)
    return drafter


def _cut(sample: Sample, answer: int) -> Sample:
    """Different lengths in a batch: some conversations end while others still run."""
    end = sample.prompt_len + answer
    assert sample.states is not None
    return sample._replace(tokens=sample.tokens[:end], states=sample.states[: len(sample.tokens[:end]) - 1])


@pytest.mark.parametrize("kind", KINDS)
def test_replay_equals_speculation_written_out(kind: str) -> None:
    """Catches errors of batching, of the verification behind cached K/V, and of what is carried between rounds."""
    target = toy_target()
    drafter, samples = _loud(target, kind), [_cut(s, 5 + 7 * (i % 3)) for i, s in enumerate(toy_samples(target, 9))]
    histograms = []
    for relay in (False, True):
        loops = [_greedy(drafter, target, sample, relay) for sample in samples]
        measured = replay(drafter, target, samples, relay=relay, batch_size=5)
        histograms.append([list(outcome.histogram or ()) for outcome in measured.outcomes])
        assert histograms[-1] == [loop.histogram for loop in loops]
        assert [o.tokens for o in measured.outcomes] == [len(s.tokens) - 1 - s.prompt_len for s in samples]
        assert measured.relayed_rows == sum(loop.relayed_rows for loop in loops)
        assert (measured.relayed_rows > 0) is relay
        assert measured.mask_rows == measured.rounds * 3
    assert histograms[0] != histograms[1]  # a relay too quiet to matter would prove nothing


def _sampled(target: Target, tmp_path: Path, count: int, length: int) -> list[Sample]:
    prompts = [(f"p/{i}", [3 + i % 5, 7, 9 + i % 2]) for i in range(count)]
    return target_answers(
        target, prompts, tmp_path / "sampled.jsonl", temperature=TEMPERATURE, seed=3, max_new_tokens=length,
        log=lambda line: None,
    )  # fmt: skip


@pytest.fixture
def bigrams(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """A stand-in for ``draft_tokens``: each draft is the target's top-1 behind the token before alone.

    The toy target often follows such bigrams; the toy drafter is right too rarely to tell two laws apart.
    """
    target = toy_target()
    behind = [_run(target, [token]).logits[-1].argmax() for token in range(target.shape.vocab_size)]
    successor = torch.stack(behind)  # [V]

    def draft_tokens(*arguments: Any) -> torch.Tensor:
        tokens = [arguments[3]]  # anchor ids [S, 1]
        for _ in range(3):
            tokens.append(successor[tokens[-1]])
        return torch.stack(tokens[1:], dim=-1)

    monkeypatch.setattr("sglang_dflow.training.replay.draft_tokens", draft_tokens)
    return draft_tokens


def _drafts(draft_tokens: Callable[..., torch.Tensor], anchor: int) -> list[int]:
    return draft_tokens(*[torch.tensor([[anchor]])] * 4)[0, 0].tolist()


def test_sampled_acceptance_is_the_analytic_probability(bigrams: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    """Catches sampled text that is truncated, or drawn at another temperature: in a first round the first draft is
    accepted with probability sum over anchors of p(anchor) * p(draft | anchor)."""
    target = toy_target()
    prompts = [[3 + i % 5, 7, 9 + i % 2] for i in range(10)]
    expected = 0.0
    for prompt in prompts:
        first = torch.softmax(_run(target, prompt).logits[-1] / TEMPERATURE, -1)
        for anchor, weight in enumerate(first.tolist()):
            second = torch.softmax(_run(target, [*prompt, anchor]).logits[-1] / TEMPERATURE, -1)
            expected += weight * float(second[_drafts(bigrams, anchor)[0]]) / len(prompts)
    count = 3000
    measured = replay(toy_drafter(target), target, _sampled(target, tmp_path, count, 2), batch_size=500)
    assert measured.rounds == count and measured.by_depth is not None
    error = (expected * (1 - expected) / count) ** 0.5
    assert abs(measured.by_depth[0] - expected) < 4 * error
    assert measured.by_depth[1] == 0.0  # the text ends there


def test_sampled_replay_equals_speculative_sampling(bigrams: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    """The claim of replay.py: a walk over sampled text has the law of speculative sampling by the server's rule."""
    torch.manual_seed(11)
    target = toy_target()
    drafter, length, count = toy_drafter(target), 10, 150
    replayed = replay(drafter, target, _sampled(target, tmp_path, 3000, length), batch_size=500)
    info = SimpleNamespace(
        temperatures=torch.tensor([[TEMPERATURE]]), top_ks=None, top_ps=None, min_ps=None,
        need_top_k_sampling=False, need_top_p_sampling=False, need_min_p_sampling=False,
    )  # fmt: skip
    rounds = torch.zeros(count)
    for index in range(count):
        text = [3 + index % 5, 7, 9 + index % 2]
        text.append(int(torch.multinomial(torch.softmax(_run(target, text).logits[-1] / TEMPERATURE, -1), 1)))
        while len(text) < 3 + length:
            block = [text[-1], *_drafts(bigrams, text[-1])]
            logits = _run(target, [*text[:-1], *block]).logits[len(text) - 1 :]
            accept_len, bonus = compute_sampled_accept_and_bonus(
                candidates=torch.tensor([block]), next_token_logits=logits, sampling_info=info,
                threshold_single=1.0, threshold_acc=1.0,
            )  # fmt: skip
            text += [*block[1 : int(accept_len) + 1], int(bonus)]
            rounds[index] += 1
    tau, expected = replayed.tau, (length - 1) * count / float(rounds.sum())
    errors = [_error(r, length - 1) for r in (rounds, torch.tensor([float(o.rounds) for o in replayed.outcomes]))]
    assert expected > 1.3
    assert abs(tau - expected) < 4 * (errors[0] ** 2 + errors[1] ** 2) ** 0.5


def _error(rounds: torch.Tensor, tokens: int) -> float:
    """Standard error of ``tokens / mean(rounds)``."""
    mean = float(rounds.mean())
    return tokens / mean**2 * float(rounds.std()) / len(rounds) ** 0.5


def test_answers_are_kept_for_the_same_prompt_only(tmp_path: Path) -> None:
    """Catches answers that are drawn anew for the second arm, and answers to a prompt that has changed since."""
    target = toy_target()
    first = _sampled(target, tmp_path, 40, 6)
    again = _sampled(target, tmp_path, 40, 6)
    assert [s.tokens.tolist() for s in first] == [s.tokens.tolist() for s in again]
    assert len((tmp_path / "sampled.jsonl").read_text().splitlines()) == 40
    assert len({tuple(s.tokens.tolist()) for s in first if s.tokens[:3].tolist() == [3, 7, 9]}) > 1  # not one stream
    changed = target_answers(
        target, [("p/0", [20, 21])], tmp_path / "sampled.jsonl", temperature=TEMPERATURE, seed=3, max_new_tokens=6,
        log=lambda line: None,
    )  # fmt: skip
    assert changed[0].tokens[:2].tolist() == [20, 21]
    greedy = target_answers(
        target, [("p/0", [20, 21])], tmp_path / "greedy.jsonl", temperature=0.0, seed=3, max_new_tokens=6,
        log=lambda line: None,
    )  # fmt: skip
    assert greedy[0].tokens[2:].tolist() == generate_batch(target, [[20, 21]], 6, Sampling())[0].tokens


def test_fingerprint_changes_with_the_weights(tmp_path: Path) -> None:
    """Catches answers of an earlier target in the same directory (a laboratory target trained again)."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"one")
    before = fingerprint(tmp_path)
    assert before == fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"three")
    assert fingerprint(tmp_path) != before


def test_refusals() -> None:
    target = toy_target()
    with pytest.raises(ValueError, match="has no relay"):
        replay(toy_drafter(target), target, toy_samples(target, 1), relay=True)
    with pytest.raises(ValueError, match="no conversations"):
        replay(toy_drafter(target), target, [])
