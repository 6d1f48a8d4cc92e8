"""relay/kernels: interpreted on CPU tensors against the formula (`benchmarks/gpu/parity.py`), and what they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.parity import CASES, WITHOUT_RELAY
from sglang_dflow.relay.alignment import RelayRule, RelaySource
from sglang_dflow.relay.draft_input import TokenTable, relayed_input
from sglang_dflow.relay.modulation import RelayModulation
from sglang_dflow.relay.pool import RelayPool, VerifiedBlock
from sglang_dflow.relay.rescore import RelayRescorer

ROOT = Path(__file__).parents[2]
B, H, W = 8, 16, 12


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    """All cases, in a process of their own: Triton interprets or compiles per process, and the others must compile."""
    command = [sys.executable, "-m", "benchmarks.gpu.interpreted", "benchmarks.gpu.parity"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    lines = map(json.loads, run.stdout.splitlines())
    return {line.pop("case"): line for line in lines}


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_equal_the_formula(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    """Store, gather and apply as one: pool contents, relayed rows, untouched bits, refused rows, counts."""
    outcome = outcomes[name]
    assert "problem" not in outcome, outcome["problem"]
    assert (outcome["relayed"] == 0) == (name in WITHOUT_RELAY), "a case that relays nothing tests nothing"


def _pool(**options: Any) -> RelayPool:
    return RelayPool(
        num_rows=4, block_size=B, hidden_size=H, rule=RelayRule.of(RelaySource.SUFFIX, shift_label=False),
        device="cpu", use_kernels=True, **{"dtype": torch.float32, **options},
    )  # fmt: skip


def _block(batch_size: int = 2) -> VerifiedBlock:
    ids = torch.zeros(batch_size, dtype=torch.int64)
    return VerifiedBlock(torch.zeros(batch_size, B, H), ids, ids[:, None].repeat(1, B), ids.int(), ids)


@pytest.mark.parametrize(
    ("field", "wrong", "message"),
    [
        ("hidden", torch.zeros(2, B, H + 1), r"hidden is torch.float32 \(2, 8, 17\), contiguous; expected any dtype"),
        ("hidden", torch.zeros(2, H, B).mT, "hidden is .*, not contiguous;"),
        ("accept_len", torch.zeros(2), "accept_len is torch.float32"),
        ("candidates", torch.zeros(2, B + 1, dtype=torch.int64), r"candidates .* expected .* \(2, 8\)"),
    ],
)
def test_store_refuses_what_it_would_misread(field: str, wrong: torch.Tensor, message: str) -> None:
    """A wrong shape or stride would write another request's state, silently."""
    with pytest.raises(ValueError, match=f"relay_store: {message}"):
        _pool().store(torch.tensor([1, 2]), _block()._replace(**{field: wrong}))


def _draft(batch_size: int = 2, **changed: torch.Tensor) -> torch.Tensor:
    given = {
        "req_pool_indices": torch.zeros(batch_size, dtype=torch.int64),
        "positions": torch.zeros(batch_size, B, dtype=torch.int64),
        "blocks": torch.zeros(batch_size, B, H),
    } | changed
    table = TokenTable(torch.zeros(5, H))
    return relayed_input(_pool(), RelayModulation(H, W), table, *given.values())


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("req_pool_indices", torch.zeros(2, dtype=torch.int32)),
        ("positions", torch.zeros(2, B + 1, dtype=torch.int64)),
        ("blocks", torch.zeros(2, B, H, dtype=torch.bfloat16)),
        ("blocks", torch.zeros(2, H, B).mT),
    ],
)
def test_draft_refuses_what_it_would_misread(name: str, wrong: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_dflow.relay.kernels.gather._relay_gather_kernel", _no_launch())
    with pytest.raises(ValueError, match=f"relay_(gather|apply): {name} is "):
        _draft(**{name: wrong})


def _no_launch() -> Any:
    class Launcher:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: None

    return Launcher()


def test_empty_batch_launches_nothing() -> None:
    """An idle rank; a launch would fail here, there is no GPU."""
    _pool().store(torch.empty(0, dtype=torch.int64), _block(0))
    assert _draft(0).shape == (0, B, H)


@pytest.mark.parametrize(
    ("pool", "relay", "message"),
    [
        ({}, lambda: RelayModulation(H, W).to(torch.float64), "torch.float32, torch.float64, expected one of bfloat16"),
        ({}, lambda: RelayModulation(H + 1, W), "hidden size or stale token differ"),
        ({"stale_token": True}, lambda: RelayModulation(H, W), "hidden size or stale token differ"),
    ],
)
def test_unsupported_drafters_are_refused_at_start(pool: dict[str, Any], relay: Any, message: str) -> None:
    from sglang_dflow.relay.kernels.tiles import check_supported

    with pytest.raises(ValueError, match=f"the relay's GPU kernels cannot serve this drafter: .*{message}"):
        check_supported(_pool(**pool), relay())
    check_supported(_pool(), RelayModulation(H, W))


def test_a_rescorer_may_be_wider_than_the_drafter() -> None:
    """It is float32 beside a 16-bit relay, and no kernel reads it."""
    from sglang_dflow.relay.kernels.tiles import check_supported

    relay = RelayModulation(H, W, stale_token=True, rescorer=RelayRescorer(B, H, 64)).bfloat16()
    assert {parameter.dtype for parameter in relay.parameters()} == {torch.bfloat16, torch.float32}
    check_supported(_pool(stale_token=True, dtype=torch.bfloat16), relay)


def test_an_activation_without_a_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever adds an activation to the modulation must add it to the kernel, not serve another one."""
    from sglang_dflow.relay.kernels.tiles import check_supported

    monkeypatch.setitem(__import__("sglang_dflow.relay.modulation", fromlist=["x"]).ACTIVATIONS, "tanh", torch.nn.Tanh)
    with pytest.raises(ValueError, match="relay_activation is tanh"):
        check_supported(_pool(), RelayModulation(H, W, activation="tanh"))


def test_pool_bytes_count_the_statistics() -> None:
    """The host's memory budget is cut by `nbytes`."""
    plain = RelayPool(num_rows=4, block_size=B, hidden_size=H, rule=_pool().rule, dtype=torch.float32, device="cpu")
    assert not plain.use_kernels, "CPU tensors take the torch path"
    assert _pool().nbytes - plain.nbytes == 4 * B * 2 * 4
