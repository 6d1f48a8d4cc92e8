"""relay/modulation.py: the split MLP is the formula of the method."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sglang_dflow.relay.modulation import RelayModulation

H, W = 12, 20


def _random(activation: str = "silu") -> RelayModulation:
    torch.manual_seed(0)
    relay = RelayModulation(H, W, activation=activation, norm_eps=1e-5)
    for parameter in relay.parameters():
        torch.nn.init.normal_(parameter)
    return relay


@pytest.mark.parametrize(("activation", "function"), [("silu", F.silu), ("gelu", F.gelu), ("relu", F.relu)])
def test_equals_the_unsplit_formula(activation: str, function) -> None:
    """Catches a wrong order of the concatenation, beta and gamma swapped, a bias lost in the split."""
    relay = _random(activation)
    hidden, bonus, rejected = torch.randn(3, 5, H), torch.randn(3, H), torch.randn(3, H)
    state = relay.state_dict()
    for r in range(3):
        for i in range(5):
            x = torch.cat((bonus[r], rejected[r], hidden[r, i]))
            inner = function(state["relay_mlp.0.weight"] @ x + state["relay_mlp.0.bias"])
            both = state["relay_mlp.2.weight"] @ inner + state["relay_mlp.2.bias"]
            h = hidden[r, i]
            norm = (h - h.mean()) / torch.sqrt(h.var(unbiased=False) + 1e-5)
            norm = norm * state["relay_norm.weight"] + state["relay_norm.bias"]
            expected = both[:H] * norm + both[H:]
            torch.testing.assert_close(relay(hidden, bonus, rejected)[r, i], expected, rtol=1e-4, atol=1e-4)


def test_stale_token_is_one_more_input_of_the_first_linear() -> None:
    """Catches the stale embedding read from the state's columns, or the boundary's part moved by it."""
    torch.manual_seed(0)
    relay = RelayModulation(H, W, stale_token=True)
    for parameter in relay.parameters():
        torch.nn.init.normal_(parameter)
    hidden, bonus, rejected, stale = torch.randn(3, 5, H), torch.randn(3, H), torch.randn(3, H), torch.randn(3, 5, H)
    per_row = (t[:, None].expand(-1, 5, -1) for t in (bonus, rejected))
    both = relay.relay_mlp(torch.cat((*per_row, hidden, stale), dim=-1))
    expected = both[..., :H] * relay.relay_norm(hidden) + both[..., H:]
    torch.testing.assert_close(relay(hidden, bonus, rejected, stale), expected, rtol=1e-4, atol=1e-4)


def test_starts_as_nothing() -> None:
    """A converted drafter must decode exactly as DFLASH: the initial relay adds exact zeros."""
    relay = RelayModulation(H, W)
    delta = relay(torch.randn(2, 3, H) * 1e3, torch.randn(2, H), torch.randn(2, H))
    assert torch.equal(delta, torch.zeros(2, 3, H))


def test_parameter_names_are_the_checkpoint_names() -> None:
    """Catches a rename that would make published checkpoints unreadable."""
    assert set(RelayModulation(H, W).state_dict()) == {
        "relay_norm.weight",
        "relay_norm.bias",
        "relay_mlp.0.weight",
        "relay_mlp.0.bias",
        "relay_mlp.2.weight",
        "relay_mlp.2.bias",
    }


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="relay_activation is 'tanh', expected one of"):
        RelayModulation(H, W, activation="tanh")
