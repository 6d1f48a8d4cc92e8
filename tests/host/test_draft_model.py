"""serving/draft_model.py: the mixin over a stand-in for the host's draft model, which only records what it is fed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_dflow.relay.alignment import RelayRule, RelaySource
from sglang_dflow.relay.pool import RelayPool, VerifiedBlock
from sglang_dflow.serving.draft_model import RelayMixin

B, H, W, BS = 4, 6, 5, 2
CONFIG = {
    "architectures": ["DFlowDraftModel"],
    "hidden_size": H,
    "block_size": B,
    "rms_norm_eps": 1e-5,
    "dflash_config": {"target_layer_ids": [0]},
    "dflow_config": {"relay_source": "first_rejection", "relay_hidden_size": W, "relay_activation": "silu"},
}
HOST_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


class HostModel(nn.Module):
    """Takes the host's arguments; keeps the embeddings it drafts from and the names it loads."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.fed: torch.Tensor | None = None
        self.loaded: list[str] = []

    def project_target_hidden(self, target_hidden: torch.Tensor) -> torch.Tensor:
        return target_hidden * 2

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any, input_embeds: torch.Tensor) -> None:
        self.fed = input_embeds

    def load_weights(self, weights: Any) -> None:
        self.loaded = [name for name, _ in weights]


class Model(RelayMixin, HostModel):
    pass


def _model(*, stale_token: bool = False) -> Any:
    dflow = CONFIG["dflow_config"] | {"relay_stale_token": stale_token}  # type: ignore[operator]
    return Model(SimpleNamespace(to_dict=lambda: CONFIG | {"dflow_config": dflow}))


@pytest.fixture(params=[False, True], ids=["paper", "stale_token"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    built = _model(stale_token=request.param)
    for parameter in built.relay.parameters():
        nn.init.normal_(parameter)
    return built


def _attach(model: Any) -> tuple[RelayPool, torch.Tensor]:
    pool = RelayPool(
        num_rows=4,
        block_size=B,
        hidden_size=H,
        rule=RelayRule.of(RelaySource.FIRST_REJECTION, shift_label=False),
        dtype=torch.float32,
        device="cpu",
        stale_token=model.dflow_config.relay_stale_token,
    )
    table = torch.randn(50, H)
    model.attach_relay(pool, lambda ids: torch.nn.functional.embedding(ids, table))
    return pool, table


def _draft(model: Any, embeds: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    model.forward(None, positions.flatten(), SimpleNamespace(req_pool_indices=slots), embeds)
    return model.fed


def _stored(pool: RelayPool) -> VerifiedBlock:
    """Slot 1: a = 1 at P' = 12, so rows 1 and 2 relay source rows 2 and 3. Slot 2: everything accepted."""
    block = VerifiedBlock(
        hidden=torch.randn(BS, B, H),
        prefix_lens=torch.tensor([10, 26]),
        candidates=torch.tensor([[0, 1, 9, 2], [3, 4, 5, 10]]),
        accept_len=torch.tensor([1, 3]),
        bonus=torch.tensor([7, 8]),
        stale=torch.arange(BS * B).view(BS, B) + 20,
    )
    pool.store(torch.tensor([1, 2]), block)
    return block


def test_only_relayed_rows_change_and_by_the_formula(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row against the modulation; anchors, rows out of range and full acceptance keep their bits (I5, I6)."""
    pool, table = _attach(model)
    block = _stored(pool)
    embeds = torch.randn(BS * B, H)
    positions = torch.tensor([[12], [30]]) + torch.arange(B)
    slots = torch.tensor([1, 2])

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("host read in the draft forward")

    with monkeypatch.context() as patch:
        for name in HOST_READS:
            patch.setattr(torch.Tensor, name, refuse)
        fed = _draft(model, embeds, slots, positions)
    expected = embeds.clone().view(BS, B, H)
    for row, source in ((1, 2), (2, 3)):
        stale = (table[20 + source : 21 + source],) if model.dflow_config.relay_stale_token else ()
        delta = model.relay(block.hidden[0, source : source + 1], table[7], table[9], *stale)[0]
        expected[0, row] += delta
    torch.testing.assert_close(fed.view(BS, B, H), expected)
    unchanged = [(0, 0), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert all(torch.equal(fed.view(BS, B, H)[r, t], embeds.view(BS, B, H)[r, t]) for r, t in unchanged)


def test_nan_in_an_unused_row_reaches_nothing(model: Any) -> None:
    """A product with a 0 mask would let it through."""
    pool, _ = _attach(model)
    pool.hidden[1] = float("nan")
    embeds = torch.randn(B, H)
    assert torch.equal(_draft(model, embeds, torch.tensor([1]), torch.arange(B).unsqueeze(0)), embeds)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_row_that_is_not_finite_is_refused(model: Any, value: float) -> None:
    """The bad row drafts from its mask embedding, bit for bit, and is counted; the request's good row is relayed."""
    pool, _ = _attach(model)
    _stored(pool)
    pool.hidden[1, 3, 0] = value  # source of row 2; row 1 reads source row 2
    embeds = torch.randn(BS * B, H)
    fed = _draft(model, embeds, torch.tensor([1, 2]), torch.tensor([[12], [30]]) + torch.arange(B))
    assert fed.isfinite().all()
    changed = (fed != embeds).any(dim=1).view(BS, B)
    assert changed.tolist() == [[False, True, False, False], [False] * B]
    assert pool.last_rounds(torch.tensor([1, 2]))[:, :3].tolist() == [[1, 1, 1], [0, 0, 3]]


def test_without_a_pool_the_model_is_the_hosts(model: Any) -> None:
    embeds = torch.randn(B, H)
    assert _draft(model, embeds, torch.tensor([1]), torch.arange(B)) is embeds


def test_projection_is_handed_over_once(model: Any) -> None:
    assert model.take_projected() is None
    projected = model.project_target_hidden(torch.ones(3, H))
    assert model.take_projected() is projected
    assert model.take_projected() is None


def test_first_load_is_complete_later_ones_partial(model: Any) -> None:
    """Online weight updates come in parts; a drafter that never got its relay must not serve."""
    trained = _model(stale_token=model.dflow_config.relay_stale_token).relay.state_dict()
    state = {f"model.{name}": tensor for name, tensor in trained.items()}
    some = dict(list(state.items())[:2])
    with pytest.raises(ValueError, match="4 problem"):
        model.load_weights(iter({"layers.0.w": torch.zeros(1), **some}.items()))
    model.load_weights(iter({"layers.0.w": torch.zeros(1), **state}.items()))
    assert model.loaded == ["layers.0.w"]
    assert torch.equal(model.relay.relay_mlp[2].weight, torch.zeros(2 * H, W))
    model.load_weights(iter({"layers.1.w": torch.zeros(1)}.items()))
    assert model.loaded == ["layers.1.w"]
    model.load_weights(iter({"relay_norm.bias": torch.full((H,), 3.0)}.items()))
    assert torch.equal(model.relay.relay_norm.bias, torch.full((H,), 3.0))
    with pytest.raises(ValueError, match="relay_norm.bias has shape"):
        model.load_weights(iter({"relay_norm.bias": torch.zeros(2)}.items()))
