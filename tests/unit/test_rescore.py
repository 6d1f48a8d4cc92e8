"""relay/rescore.py, its evidence in the pool, its fit (training/rescore.py) and its place in a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from sglang_dflow.checkpoint_files import tensor_headers
from sglang_dflow.config import DFlowConfig, checkpoint_problems, tensor_problems
from sglang_dflow.inspect_checkpoint import inspect_checkpoint
from sglang_dflow.relay.alignment import RelayRule, RelaySource
from sglang_dflow.relay.pool import DraftRows, RelayPool, VerifiedBlock
from sglang_dflow.relay.rescore import NONE, Evidence, Look, RelayRescorer, TokenCodes, candidates
from sglang_dflow.training.convert import RESCORE_WEIGHTS, attach_rescorer, strip_relay
from sglang_dflow.training.drafter import Drafter, DrafterConfig
from sglang_dflow.training.replay import replay
from sglang_dflow.training.rescore import Examples, candidate_loss, collect, fit, measure, with_rescorer
from tests.unit.training_toys import toy_samples, toy_target

B, R, H, W, K, E, VOCAB = 6, 5, 8, 16, 3, 4, 30
EMBEDDING = torch.randn(VOCAB, H, generator=torch.Generator().manual_seed(5))


def _rescorer(block_size: int = B) -> RelayRescorer:
    return RelayRescorer(block_size, H, W, top_k=K, code_size=E)


def _loud(seed: int = 0) -> RelayRescorer:
    torch.manual_seed(seed)
    rescorer = _rescorer()
    for parameter in rescorer.parameters():
        torch.nn.init.normal_(parameter)
    return rescorer


def _codes(rescorer: RelayRescorer) -> TokenCodes:
    return lambda tokens: rescorer.codes(EMBEDDING[tokens.clamp_min(0)])


def _best(count: int, rows: int = R) -> torch.Tensor:
    """K different tokens a row."""
    return torch.rand(count, rows, VOCAB).topk(K).indices


def _look(best: torch.Tensor, stale: torch.Tensor, proposed: torch.Tensor | None = None) -> Look:
    """A look with the drafter's logits in their order, and random other things."""
    count = len(stale)
    tokens = candidates(best, stale)
    logits = 3 * torch.rand(tokens.shape)
    logits[..., :K] = logits[..., :K].sort(descending=True).values + 3.0
    nothing = torch.full_like(stale, NONE)
    bonus, rejected = torch.arange(count) % VOCAB, (torch.arange(count) + 7) % VOCAB
    evidence = Evidence(stale, bonus, rejected, nothing if proposed is None else proposed)
    return Look(tokens, logits, torch.randn(*stale.shape, H), evidence)


def _scores(rescorer: RelayRescorer, look: Look) -> torch.Tensor:
    """Behind the drafter's own tokens."""
    before = torch.cat((look.evidence.bonus[:, None], look.tokens[:, :-1, 0]), dim=1)
    return rescorer(look, _codes(rescorer), before)


def test_candidates_are_the_best_and_the_stale_tokens_around() -> None:
    """Catches an offset of the wrong sign, and a token from beyond the block."""
    best, stale = torch.tensor([[[1, 6], [2, 7], [3, 8], [4, 9]]]), torch.tensor([[11, 12, 13, NONE]])
    found = candidates(best, stale)[0].tolist()
    assert found == [[1, 6, NONE, 11, 12], [2, 7, 11, 12, 13], [3, 8, 12, 13, NONE], [4, 9, 13, NONE, NONE]]


def test_a_new_rescorer_keeps_every_draft() -> None:
    look = _look(_best(40), torch.randint(-1, 9, (40, R)))
    rescorer = _rescorer()
    assert torch.equal(rescorer.choose(look, _codes(rescorer)), look.tokens[..., 0])


def test_only_tokens_that_are_there_are_chosen() -> None:
    """A loud rescorer takes other tokens, never `NONE`, and nothing at all in a block without a stale token."""
    stale = torch.randint(0, VOCAB, (400, R))
    stale[torch.arange(R) >= torch.randint(0, R + 1, (400, 1))] = NONE
    look, rescorer = _look(_best(400), stale), _loud()
    chosen, drafts = rescorer.choose(look, _codes(rescorer)), look.tokens[..., 0]
    assert (look.tokens == chosen.unsqueeze(-1)).any(-1).all() and (chosen >= 0).all()
    without = (stale == NONE).all(-1)
    assert without.any() and torch.equal(chosen[without], drafts[without])
    assert (chosen != drafts).float().mean() > 0.2


def test_the_walk_follows_its_own_tokens() -> None:
    """Row by row, `choose` takes the best score behind what it chose before: the anchor, then its own tokens."""
    look, rescorer = _look(_best(200), torch.randint(0, VOCAB, (200, R))), _loud()
    chosen = rescorer.choose(look, _codes(rescorer))
    before = look.evidence.bonus[:, None].expand(-1, R).clone()
    for row in range(R):
        scores = rescorer(look, _codes(rescorer), before)[:, row]
        token = look.tokens[:, row].gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)
        assert torch.equal(token, chosen[:, row])
        if row + 1 < R:
            before[:, row + 1] = token
    anchored = look.evidence._replace(bonus=look.evidence.bonus.roll(1))
    other = rescorer.choose(look._replace(evidence=anchored), _codes(rescorer))
    assert (other[:, 0] != chosen[:, 0]).any(), "the anchor must have a say"


def test_what_is_not_there_has_no_say() -> None:
    """The logit of `NONE` is whatever a lookup gave, another thing on every number of ranks."""
    stale = torch.randint(0, VOCAB, (60, R))
    stale[:, 2:] = NONE
    look = _look(_best(60), stale)
    other = look._replace(logits=torch.where(look.tokens == NONE, 50.0, look.logits))
    assert torch.equal(_scores(_loud(), look), _scores(_loud(), other))


def test_a_repeated_candidate_counts_once() -> None:
    """Else a token that is draft and stale token would get two shares of the softmax that is fitted."""
    look = _look(torch.tensor([[[7, 5], [8, 7]]]), torch.tensor([[7, 7]]))
    finite = RelayRescorer(3, H, W, top_k=2, code_size=E).row_scores(look)[0].isfinite().tolist()
    assert finite == [[True, True, False, False, False], [True, True, False, False, False]]


def test_what_was_proposed_has_a_say() -> None:
    """Every row's proposal is a sign of its own, and of its neighbours'; `NONE` is none."""
    stale = torch.randint(0, VOCAB, (60, R))
    look, rescorer = _look(_best(60), stale), _loud()
    before = _scores(rescorer, look)
    for row in range(R):
        proposed = look.evidence.proposed.clone()
        proposed[:, row] = stale[:, row]
        changed = _scores(rescorer, look._replace(evidence=look.evidence._replace(proposed=proposed))) != before
        assert changed.any(0).any(-1)[max(row - 1, 0) : row + 2].all()


def test_blocks_of_two_have_one_row() -> None:
    look, rescorer = _look(torch.tensor([[[4, 6, 5]]]), torch.tensor([[3]])), _rescorer(2)
    assert rescorer.choose(look, _codes(rescorer)).tolist() == [[4]]


def test_it_stays_float32_in_a_drafter_of_16_bits() -> None:
    rescorer = _loud()
    before = rescorer.inner.weight.clone()
    assert torch.equal(rescorer.bfloat16().inner.weight, before)
    look = _look(_best(8), torch.randint(0, VOCAB, (8, R)))
    assert _scores(rescorer, look._replace(hidden=look.hidden.bfloat16())).dtype == torch.float32


# --- the pool's evidence ---------------------------------------------------------------------------------


def _pool(source: RelaySource = RelaySource.FIRST_REJECTION) -> RelayPool:
    rule = RelayRule.of(source, shift_label=False)
    f32 = {"dtype": torch.float32, "device": "cpu"}
    return RelayPool(num_rows=5, block_size=B, hidden_size=2, rule=rule, stale_token=True, proposals=True, **f32)


def _store(pool: RelayPool, slot: int, prefix_len: int, accept_len: int) -> torch.Tensor:
    """Store a round; returns the absolute positions [1, B] of the next draft."""
    tokens = torch.arange(B)[None]
    block = VerifiedBlock(
        hidden=torch.zeros(1, B, 2),
        prefix_lens=torch.tensor([prefix_len]),
        candidates=100 + tokens,
        accept_len=torch.tensor([accept_len]),
        bonus=torch.tensor([99]),
        stale=200 + tokens,
    )
    pool.store(torch.tensor([slot]), block)
    return prefix_len + accept_len + 1 + tokens


def _draft(pool: RelayPool, slot: int, positions: torch.Tensor) -> Evidence:
    """Note what a draft at these positions relays, as its forward does, and ask for the evidence."""
    slots = torch.tensor([slot])
    read = pool.read(slots, positions)
    pool.note_draft(slots, DraftRows(read.mask.sum(1), torch.zeros(1, dtype=torch.int64), read.accept_len))
    return pool.evidence(slots, torch.arange(1, B)[None])


@pytest.mark.parametrize("source", list(RelaySource))
def test_evidence_is_what_the_relay_reads(source: RelaySource) -> None:
    """For every accepted length: the same rows, the same sources, and the tokens at the boundary."""
    pool = _pool(source)
    first = pool.rule.first_row
    for accept_len in range(B):
        positions = _store(pool, 3, 40, accept_len)
        read, evidence = pool.read(torch.tensor([3]), positions), _draft(pool, 3, positions)
        assert read.stale is not None
        assert torch.equal(evidence.stale[:, first - 1 :], torch.where(read.mask, read.stale, NONE))
        assert (evidence.stale[:, : first - 1] == NONE).all()
        # What stood at each position when the target made its guess, rows of the block before beyond its end excepted.
        known = (evidence.stale != NONE) & (positions[:, 1:] < 40 + B)
        assert torch.equal(evidence.proposed, torch.where(known, 100 + positions[:, 1:] - 40, NONE))
        assert evidence.bonus.tolist() == [99] and evidence.rejected.tolist() == [100 + min(accept_len + 1, B - 1)]


def test_no_evidence_without_a_round_that_ends_at_the_draft() -> None:
    """Another position, a prefill into the slot, the switch, another slot: nothing to be rescored with."""
    pool = _pool()
    positions = _store(pool, 3, 40, 1)
    assert (_draft(pool, 3, positions).stale != NONE).any()
    assert (_draft(pool, 3, positions + 1).stale == NONE).all()
    assert (_draft(pool, 2, positions).stale == NONE).all()
    pool.set_enabled(False)
    off = _draft(pool, 3, positions)
    assert (off.stale == NONE).all() and (off.proposed == NONE).all()
    pool.set_enabled(True)
    pool.invalidate(torch.tensor([3]))
    assert (_draft(pool, 3, positions).stale == NONE).all()


# --- the fit ---------------------------------------------------------------------------------------------


def _examples(count: int, seed: int) -> Examples:
    """Rounds where the stale token is right if the drafter hardly prefers its own; else, behind a token of kind 1, its
    second best is, of the other parity: the one is to be told from signs, the other from codes."""
    torch.manual_seed(seed)
    best = torch.stack((torch.randint(0, 10, (count, R)) * 2, torch.randint(0, 5, (count, R)) * 2 + 1), dim=-1)
    stale = torch.randint(20, VOCAB, (count, R))
    tokens = candidates(best, stale)
    gap = torch.rand(tokens.shape) * 8
    gap[..., 0] = 0.0
    ones = torch.ones(count, dtype=torch.int64)
    labels, before = torch.empty_like(stale), ones * 20
    for row in range(R):
        by_kind = best[:, row].gather(1, _kind(before)[:, None]).squeeze(1)
        labels[:, row] = before = torch.where(gap[:, row, 3] < 2.0, stale[:, row], by_kind)
    valid = torch.ones(count, R, dtype=torch.bool)
    nothing = torch.full_like(stale, NONE)
    hidden = torch.ones(count, R, H)
    return Examples(tokens, -gap, hidden, stale, ones * 20, ones * 21, nothing, labels, valid, torch.arange(count))


def _kind(tokens: torch.Tensor) -> torch.Tensor:
    return tokens // 2 % 2


def _telling_codes(rescorer: RelayRescorer) -> TokenCodes:
    embedding = EMBEDDING.clone()
    embedding[:, 0] = 4.0 * (1 - 2 * _kind(torch.arange(VOCAB)))
    embedding[:, 1] = 4.0 * (1 - 2 * (torch.arange(VOCAB) % 2))
    return lambda tokens: rescorer.codes(embedding[tokens.clamp_min(0)])


@pytest.mark.parametrize(("gated", "gain"), [(True, 1.2), (False, 0.2)], ids=["both", "signs alone"])
def test_fit_finds_when_the_stale_token_is_right_and_what_follows(gated: bool, gain: float) -> None:
    """Each part finds its own: without a gate nothing is known of what follows what."""
    torch.manual_seed(0)
    rescorer, train, test = RelayRescorer(B, H, W, top_k=2, code_size=E), _examples(3000, 0), _examples(300, 1)
    rescorer.gate.requires_grad_(gated)
    codes = _telling_codes(rescorer)
    before = measure(rescorer, test, codes)
    assert before.rescored == before.drafts
    fit(rescorer, train, codes, epochs=20, seed=0)
    after = measure(rescorer, test, codes)
    print(after)
    assert after.drafts == before.drafts and after.rescored > before.drafts + gain
    assert gated or after.rescored < before.drafts + 1.0


def test_rows_behind_the_end_teach_nothing() -> None:
    rescorer, examples = RelayRescorer(B, H, W, top_k=2, code_size=E), _examples(20, 2)
    examples.valid[:, 2:] = False
    changed = examples._replace(labels=examples.labels.clone())
    changed.labels[:, 2:] = 0
    losses = [candidate_loss(rescorer, found, _telling_codes(rescorer)) for found in (examples, changed)]
    assert torch.equal(*losses)


def _drafter(**fields: object) -> Drafter:
    target = toy_target()
    torch.manual_seed(1)
    config = DrafterConfig.for_target(target, num_hidden_layers=2, block_size=4, mask_token_id=1, relay_hidden_size=6)
    drafter = Drafter(dataclasses.replace(config, **{"relay_stale_token": True, **fields}))  # type: ignore[arg-type]
    drafter.init_from_target(target, [2, 3])
    return drafter


def test_collected_rounds_are_those_behind_a_rejection() -> None:
    """As many as the replay relayed, each with a stale token; their labels are the text behind their anchors."""
    target = toy_target()
    drafter, samples = with_rescorer(_drafter(), W, K, E), toy_samples(target, 5)
    found, replayed = collect(drafter, target, samples, log=lambda line: None), replay(drafter, target, samples, True)
    assert len(found.bonus) == round(replayed.relayed_rounds * replayed.rounds) > 20
    assert (found.stale != NONE).any(-1).all()
    assert set(found.conversation.tolist()) == set(range(5))
    texts = [" ".join(map(str, sample.tokens.tolist())) for sample in samples]
    for number, bonus, labels, valid in zip(found.conversation, found.bonus, found.labels, found.valid):
        behind = [int(bonus), *labels[valid].tolist()]
        assert " ".join(map(str, behind)) in texts[int(number)]


@pytest.mark.parametrize("fields", [{"relay_stale_token": False}, {"relay_hidden_size": 0, "relay_stale_token": False}])
def test_a_drafter_without_stale_tokens_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected a relay with the stale token"):
        with_rescorer(_drafter(**fields), W)


# --- checkpoints -----------------------------------------------------------------------------------------


def test_attach_keeps_the_other_weights_and_can_be_repeated(tmp_path: Path) -> None:
    """The drafter's file is copied byte for byte; the rescorer has a file of its own, which the loaders find."""
    _drafter().save(tmp_path / "src")
    first, second = (with_rescorer(_drafter(), W, K, E).rescorer for _ in range(2))
    assert first is not None and second is not None
    torch.nn.init.normal_(second.out.weight)
    attach_rescorer(tmp_path / "src", tmp_path / "a", first)
    attach_rescorer(tmp_path / "a", tmp_path / "b", second)
    for name in ("a", "b"):
        weights = (tmp_path / name / "model.safetensors").read_bytes()
        assert weights == (tmp_path / "src/model.safetensors").read_bytes()
        assert (tmp_path / name / RESCORE_WEIGHTS).is_file()
        found = inspect_checkpoint(tmp_path / name)
        assert found.serves, found.problems
    loaded = Drafter.load(tmp_path / "b").rescorer
    assert loaded is not None and torch.equal(loaded.out.weight, second.out.weight)
    strip_relay(tmp_path / "b", tmp_path / "stripped")
    assert not any(name.startswith("relay_") for name in tensor_headers(tmp_path / "stripped"))


def test_a_trainers_checkpoint_keeps_the_rescorer_exact(tmp_path: Path) -> None:
    drafter = with_rescorer(_drafter(), W, K, E)
    assert drafter.rescorer is not None
    torch.nn.init.normal_(drafter.rescorer.out.weight)
    drafter.save(tmp_path / "d")
    loaded = Drafter.load(tmp_path / "d").rescorer
    assert loaded is not None and torch.equal(loaded.out.weight, drafter.rescorer.out.weight)
    config = DFlowConfig.from_checkpoint(json.loads((tmp_path / "d/config.json").read_text()))
    shapes = {name: header.shape for name, header in tensor_headers(tmp_path / "d").items()}
    assert config.relay_rescore_size == W and not tensor_problems(config.tensor_shapes(), shapes)
    del shapes["relay_rescore.row"]
    assert "relay_rescore.row is missing" in tensor_problems(config.tensor_shapes(), shapes)[0]


def test_a_rescorer_is_switched_off_by_its_size(tmp_path: Path) -> None:
    """The advice of two refusals: the tensors may stay where they are."""
    with_rescorer(_drafter(), W, K, E).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["dflow_config"]["relay_rescore_size"] = 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Drafter.load(tmp_path).rescorer is None
    assert inspect_checkpoint(tmp_path).serves


@pytest.mark.parametrize(
    ("dflow", "dflash", "problem"),
    [
        ({"relay_rescore_size": -3}, {}, "relay_rescore_size is -3, expected a positive integer"),
        ({"relay_rescore_size": True}, {}, "relay_rescore_size is True"),
        ({"relay_rescore_top_k": 1}, {}, "relay_rescore_top_k is 1, expected an integer of at least 2"),
        ({"relay_rescore_code_size": None}, {}, "relay_rescore_code_size is None, expected an integer of at least 1"),
        ({"relay_stale_token": False}, {}, "without relay_stale_token"),
        ({}, {"projector_type": "domino"}, "set for a Domino drafter"),
        ({}, {"selector_rank": 8}, "set for a DFlash2 drafter"),
    ],
)
def test_what_cannot_be_rescored_is_refused(dflow: dict, dflash: dict, problem: str) -> None:
    config = with_rescorer(_drafter(), W, K, E).config.to_json("bfloat16")
    assert not checkpoint_problems(config)
    config["dflow_config"] |= dflow
    config["dflash_config"] |= dflash
    assert any(problem in found for found in checkpoint_problems(config)), checkpoint_problems(config)
