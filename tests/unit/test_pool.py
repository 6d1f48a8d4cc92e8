"""relay/pool.py: a row belongs to one request, for one round, and nothing is read on the host."""

from __future__ import annotations

import pytest
import torch

from sglang_dflow.relay.alignment import RelayRule, RelaySource
from sglang_dflow.relay.pool import RelayPool, RelayStats, VerifiedBlock

B, H, ROWS = 8, 4, 5


def _pool(source: RelaySource = RelaySource.FIRST_REJECTION, *, stale_token: bool = False) -> RelayPool:
    return RelayPool(
        num_rows=ROWS,
        block_size=B,
        hidden_size=H,
        rule=RelayRule.of(source, shift_label=False),
        dtype=torch.float32,
        device="cpu",
        stale_token=stale_token,
    )


def _block(accept_lens: list[int], prefix_lens: list[int]) -> VerifiedBlock:
    bs = len(accept_lens)
    accept_len = torch.tensor(accept_lens, dtype=torch.int32)
    hidden = torch.arange(bs * B, dtype=torch.float32).view(bs, B, 1).expand(bs, B, H)  # row r*B+j
    return VerifiedBlock(
        hidden=hidden,
        accept_len=accept_len,
        next_prefix_len=torch.tensor(prefix_lens) + accept_len + 1,
        bonus=torch.arange(bs) + 100,
        rejected=torch.arange(bs) + 200,
    )


def _positions(prefix_lens: list[int]) -> torch.Tensor:
    return torch.tensor(prefix_lens).unsqueeze(1) + torch.arange(B)


def test_reads_back_what_the_same_request_stored() -> None:
    """Two requests with different accept lengths, read in another order: rows, tokens and states stay together."""
    pool = _pool()
    pool.store(torch.tensor([3, 1]), _block([2, 0], [10, 50]))
    read = pool.read(torch.tensor([1, 3]), _positions([51, 13]))
    assert read.bonus.tolist() == [101, 100]
    assert read.rejected.tolist() == [201, 200]
    # Request 1: a=0, rows t=1..7 from j=1..7 of batch row 1. Request 3: a=2, t=1..5 from j=3..7 of batch row 0.
    assert read.mask.tolist() == [[True] * 7, [True] * 5 + [False] * 2]
    assert read.hidden[0, :, 0].tolist() == [B + j for j in range(1, 8)]
    assert read.hidden[1, :5, 0].tolist() == [3, 4, 5, 6, 7]


def test_stale_tokens_travel_with_their_states() -> None:
    """Catches a stale token taken from the row that is drafted instead of the row that its state comes from."""
    pool = _pool(stale_token=True)
    tokens = torch.arange(2 * B).view(2, B) + 1000
    pool.store(torch.tensor([3, 1]), _block([2, 0], [10, 50])._replace(stale=tokens))
    read = pool.read(torch.tensor([1, 3]), _positions([51, 13]))
    assert read.stale is not None
    assert read.stale[0].tolist() == [1000 + B + j for j in range(1, 8)]
    assert read.stale[1, :5].tolist() == [1000 + j for j in range(3, 8)]
    assert pool.nbytes - _pool().nbytes == ROWS * B * 8


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("prefill of a new owner", lambda pool: pool.invalidate(torch.tensor([2]))),
        ("flush", lambda pool: pool.clear()),
        ("switched off", lambda pool: pool.set_enabled(False)),
        ("full acceptance", lambda pool: pool.store(torch.tensor([2]), _block([B - 1], [3]))),
    ],
)
def test_nothing_is_relayed_after(name: str, act) -> None:
    """I2/I4: a new owner at the very position of the old one must find plain masks."""
    pool = _pool()
    pool.store(torch.tensor([2]), _block([0], [10]))
    assert pool.read(torch.tensor([2]), _positions([11])).mask.all(), (
        "the plant must be readable, or this proves nothing"
    )
    act(pool)
    assert not pool.read(torch.tensor([2]), _positions([11])).mask.any(), name


def test_padding_row_stays_empty() -> None:
    """Padded rows of a CUDA graph read row 0: never relayed, never counted."""
    pool = _pool()
    pool.store(torch.tensor([1]), _block([0], [10]))
    read = pool.read(torch.tensor([1, 0, 0]), _positions([11, 0, 0]))
    assert not read.mask[1:].any()
    assert pool.stats() == RelayStats(relayed_rows=7, eligible_rows=7)


def test_storage_does_not_alias_the_source() -> None:
    """I1: the host overwrites its captured states in the next forward."""
    pool = _pool()
    block = _block([0], [10])
    source = block.hidden.clone()
    pool.store(torch.tensor([1]), block._replace(hidden=source))
    source.fill_(-1.0)
    assert (pool.hidden[1] >= 0).all()


def test_hit_rate_counts_relayed_of_eligible() -> None:
    pool = _pool(RelaySource.SUFFIX)
    pool.store(torch.tensor([1]), _block([2], [10]))
    pool.read(torch.tensor([1]), _positions([13]))  # suffix, a=2: rows 2..5
    assert pool.stats() == RelayStats(relayed_rows=4, eligible_rows=7)
    assert pool.stats().hit_rate == pytest.approx(4 / 7)
    assert RelayStats(0, 0).hit_rate == 0.0


def test_no_host_read_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """I6: storing, reading and invalidating never look at a value on the host."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("host read in the decode path")

    pool, indices, block, positions = _pool(), torch.tensor([1, 2]), _block([1, 7], [5, 9]), _positions([7, 17])
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    pool.store(indices, block)
    pool.read(indices, positions)
    pool.invalidate(indices)
    pool.set_enabled(True)
    pool.clear()


def test_empty_batch_is_a_no_op() -> None:
    pool = _pool()
    none = torch.empty((0,), dtype=torch.int64)
    pool.store(none, VerifiedBlock(torch.empty((0, B, H)), none, none, none, none))
    assert (pool.next_prefix_len == -1).all()


def test_nbytes_is_the_formula_of_the_docs() -> None:
    assert _pool().nbytes == ROWS * (B * H * 4 + 4 * 8) + 1 + 2 * 8
