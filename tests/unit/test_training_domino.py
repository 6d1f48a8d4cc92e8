"""The Domino head in training: features, rollout, loss, checkpoint. References use plain modules, token by token."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_dflow.training.domino import DominoHead, domino_loss
from sglang_dflow.training.drafter import Drafter, DrafterConfig
from sglang_dflow.training.loss import (
    Vocabulary,
    block_loss,
    full_vocabulary,
    row_weights,
    sampled_vocabulary,
)
from tests.unit.training_toys import toy_target

N, B, H, G, E, V = 5, 4, 6, 3, 5, 20
SHIFTS = pytest.mark.parametrize("shift_label", [False, True])


def _head(shift_label: bool, *, trained: bool = True) -> DominoHead:
    torch.manual_seed(3)
    head = DominoHead(H, G, E, V, shift_label=shift_label)
    if trained:
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter)
    return head


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block states, true tokens, target embedding, target head."""
    torch.manual_seed(4)
    return torch.randn(N, B, H), torch.randint(0, V, (N, B)), torch.randn(V, H), torch.randn(V, H)


def _logits(head: DominoHead, block: torch.Tensor, prefix: list[int], embedding: torch.Tensor, table: torch.Tensor):  # type: ignore[no-untyped-def]
    """Logits [V] of the proposal behind ``prefix`` (anchor first) of one block [B, H]."""
    index = len(prefix) - 1
    row = block[index if head.shift_label else index + 1]
    base = table @ row
    if index == 0:
        return base
    _, state = head.prefix_gru(embedding[prefix][None])
    return base + head.embed_proj(torch.cat([row, state[0, 0]]))


@SHIFTS
def test_corrections_read_the_true_prefix(shift_label: bool) -> None:
    """Catches a GRU that is one token ahead or behind, the wrong block row, and a corrected first proposal."""
    hidden, tokens, embedding, table = _inputs()
    head = _head(shift_label)
    features = head.corrections(hidden, tokens, embedding)
    logits = head.proposal_rows(hidden) @ table.T + features @ head.embed_proj[2].weight.T
    for n in range(N):
        for i in range(B - 1):
            expected = _logits(head, hidden[n], tokens[n, : i + 1].tolist(), embedding, table)
            torch.testing.assert_close(logits[n, i], expected, atol=1e-5, rtol=1e-5)


@SHIFTS
@pytest.mark.parametrize("restricted", [False, True])
def test_rollout_feeds_its_own_proposals_back(shift_label: bool, restricted: bool) -> None:
    """Catches feedback of vocabulary rows instead of token ids, chunking errors, and the negatives' bias in top-1."""
    hidden, tokens, embedding, table = _inputs()
    head = _head(shift_label)
    ids = torch.arange(1, V, 2) if restricted else torch.arange(V)
    vocabulary = Vocabulary(ids, table[ids], torch.linspace(0, 50, len(ids)))
    found = head.rollout(hidden, tokens[:, 0], embedding, vocabulary, chunk=2)
    for n in range(N):
        prefix = [int(tokens[n, 0])]
        for _ in range(B - 1):
            prefix.append(int(ids[_logits(head, hidden[n], prefix, embedding, table)[ids].argmax()]))
        assert found[n].tolist() == prefix[1:]


@SHIFTS
def test_an_untrained_head_proposes_the_base_logits(shift_label: bool) -> None:
    """Catches a head that is not silent at initialisation."""
    hidden, tokens, embedding, table = _inputs()
    head = _head(shift_label, trained=False)
    found = head.rollout(hidden, tokens[:, 0], embedding, full_vocabulary(table))
    assert torch.equal(found, (head.proposal_rows(hidden) @ table.T).argmax(-1))


@SHIFTS
def test_loss_and_gradients_equal_autograd(shift_label: bool) -> None:
    """Catches errors of the hand-made backward for every parameter, with a restricted, biased vocabulary and chunks."""
    hidden, tokens, embedding, table = _inputs()
    always = torch.zeros(V, dtype=torch.bool)
    always[:4] = True
    vocabulary = sampled_vocabulary(table, always, tokens, 3, torch.Generator().manual_seed(0))
    assert len(vocabulary.ids) < V and vocabulary.bias.any()
    valid = torch.arange(B) < torch.tensor([4, 3, 4, 2, 4])[:, None]
    results = []
    for fused in (True, False):
        head, rows = _head(shift_label), hidden.clone().requires_grad_()
        if fused:
            loss = domino_loss(head, rows, tokens, valid, embedding, vocabulary, 2.0, base_weight=0.3, chunk=4).loss
        else:
            base = head.proposal_rows(rows) @ vocabulary.head.T
            weight = head.embed_proj[2].weight[vocabulary.ids]
            final = base + head.corrections(rows, tokens, embedding) @ weight.T
            label = vocabulary.rows_of(tokens[:, 1:])[..., None]
            each = [
                -torch.log_softmax(x + vocabulary.bias, -1).gather(-1, label)[..., 0] for x in (final, base)
            ]  # [N, B - 1]
            decay = (row_weights(B, 2.0) * valid)[:, 1:]
            loss = ((0.7 * each[0] + 0.3 * each[1]) * decay).sum() / decay.sum()
        (2 * loss).backward()
        results.append([loss.detach(), rows.grad, *(parameter.grad for parameter in head.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_reports_and_the_base_term_are_those_of_the_plain_loss() -> None:
    """Catches swapped reports; with an untrained head all three losses are DFlash's."""
    hidden, tokens, embedding, table = _inputs()
    valid = torch.ones(N, B, dtype=torch.bool)
    vocabulary = full_vocabulary(table)
    plain = block_loss(hidden, tokens, valid, vocabulary, 2.0)
    untrained = domino_loss(_head(False, trained=False), hidden, tokens, valid, embedding, vocabulary, 2.0)
    for value in (untrained.loss, untrained.base, untrained.corrected):
        torch.testing.assert_close(value, plain.loss)
    trained = domino_loss(_head(False), hidden, tokens, valid, embedding, vocabulary, 2.0)
    torch.testing.assert_close(trained.base, plain.loss)
    assert abs(trained.corrected - trained.base) > 0.1
    assert torch.equal(trained.base_correct, plain.correct)
    with pytest.raises(ValueError, match=r"base_weight is 1.5, expected 0..1"):
        domino_loss(_head(False), hidden, tokens, valid, embedding, vocabulary, 2.0, base_weight=1.5)


@SHIFTS
def test_teacher_forced_acceptance_is_the_rollouts(shift_label: bool) -> None:
    """The claim of ``domino_loss``: labels are rollouts with one token spoilt, so every accepted length occurs."""
    hidden, tokens, embedding, table = _inputs()
    head, vocabulary = _head(shift_label), full_vocabulary(table)
    proposals = head.rollout(hidden, tokens[:, 0], embedding, vocabulary)
    labels = torch.cat([tokens[:, :1], proposals], dim=1)
    for n in range(B - 1):
        labels[n, n + 1] = (labels[n, n + 1] + 1) % V
    correct = domino_loss(
        head, hidden, labels, torch.ones(N, B, dtype=torch.bool), embedding, vocabulary, 2.0
    ).correct  # [N, B - 1]
    assert correct.long().cumprod(-1).sum(-1).tolist() == [0, 1, 2, 3, 3]


def test_labels_behind_the_end_change_nothing() -> None:
    """Catches padding tokens that reach the loss, or are looked up in a vocabulary that lacks them."""
    hidden, tokens, embedding, table = _inputs()
    tokens = tokens % 10
    vocabulary = Vocabulary(torch.arange(10), table[:10], torch.zeros(10))
    valid = torch.arange(B).expand(N, B) < 3
    losses = [
        domino_loss(_head(False), hidden, torch.where(valid, tokens, fill), valid, embedding, vocabulary, 2.0).loss
        for fill in (torch.tensor(0), torch.tensor(V - 1))
    ]
    assert torch.equal(*losses)


@SHIFTS
@pytest.mark.parametrize("relay_hidden_size", [0, 6])
def test_checkpoint_round_trip(tmp_path: Path, shift_label: bool, relay_hidden_size: int) -> None:
    """Catches tensor names or fields that the host does not read, and a head that is lost on the way back."""
    torch.manual_seed(0)
    config = DrafterConfig.for_target(
        toy_target(), num_hidden_layers=1, block_size=B, mask_token_id=1, relay_hidden_size=relay_hidden_size,
        projector_type="domino", gru_hidden_dim=G, emb_dim=E, shift_label=shift_label,
    )  # fmt: skip
    drafter = Drafter(config)
    drafter.save(tmp_path, torch.float32)
    written = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "projector_type": "domino", "gru_hidden_dim": G, "emb_dim": E, "shift_label": shift_label,
        "pure_draft_prefix_len": 1,
    }  # fmt: skip
    assert expected.items() <= written["dflash_config"].items()
    assert written["architectures"] == ["DFlowDraftModel" if relay_hidden_size else "DFlashDraftModel"]
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    hidden, vocab = config.hidden_size, config.vocab_size
    assert {name: shape for name, shape in shapes.items() if name.startswith(("prefix_gru", "embed_proj"))} == {
        "prefix_gru.weight_ih_l0": (3 * G, hidden),
        "prefix_gru.weight_hh_l0": (3 * G, G),
        "embed_proj.0.weight": (E, hidden + G),
        "embed_proj.2.weight": (vocab, E),
    }
    loaded = Drafter.load(tmp_path)
    assert loaded.config == config
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), drafter.state_dict().values()))


def test_fields_at_top_level_are_read_as_the_host_reads_them() -> None:
    """Older checkpoints have the Domino fields beside ``dflash_config``; the nested ones win."""
    config = DrafterConfig.for_target(
        toy_target(), num_hidden_layers=1, block_size=B, mask_token_id=1, projector_type="domino",
        gru_hidden_dim=G, emb_dim=E, shift_label=True,
    )  # fmt: skip
    written = config.to_json("float32")
    nested = written["dflash_config"]
    moved = written | {name: nested.pop(name) for name in ("projector_type", "gru_hidden_dim", "emb_dim")}
    moved |= {"shift_label": False, "pure_draft_prefix_len": nested.pop("pure_draft_prefix_len")}
    assert DrafterConfig.from_json(moved) == config
    nested["projector_type"] = None  # without a Domino head the host ignores its fields
    assert DrafterConfig.from_json(moved) == dataclasses.replace(
        config, projector_type=None, gru_hidden_dim=0, emb_dim=0, shift_label=False
    )
    nested["projector_type"] = "domino"
    with pytest.raises(ValueError, match="pure_draft_prefix_len is 2, expected 1"):
        DrafterConfig.from_json(moved | {"pure_draft_prefix_len": 2})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"projector_type": "mlp"}, "projector_type is 'mlp'"),
        ({"projector_type": "domino", "emb_dim": 4}, "gru_hidden_dim 0 and emb_dim 4"),
        ({"gru_hidden_dim": 4}, "without a Domino head"),
        ({"shift_label": True}, "without a Domino head"),
    ],
)
def test_heads_that_the_host_would_not_build_are_refused(fields: dict[str, object], message: str) -> None:
    """A checkpoint must not be written that the server ignores or refuses in part."""
    with pytest.raises(ValueError, match=message):
        DrafterConfig.for_target(toy_target(), num_hidden_layers=1, block_size=B, mask_token_id=1, **fields)
