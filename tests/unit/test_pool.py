"""relay/pool.py: a row belongs to one request, for one round, and nothing is read on the host."""

from __future__ import annotations

import pytest
import torch

from sglang_dflow.relay.alignment import RelayRule, RelaySource
from sglang_dflow.relay.pool import EMPTY, DraftRows, RelayPool, VerifiedBlock

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
        prefix_lens=torch.tensor(prefix_lens),
        candidates=200 + 10 * torch.arange(bs).unsqueeze(1) + torch.arange(B),  # row j of request r: 200 + 10r + j
        accept_len=accept_len,
        bonus=torch.arange(bs) + 100,
    )


def _positions(prefix_lens: list[int]) -> torch.Tensor:
    return torch.tensor(prefix_lens).unsqueeze(1) + torch.arange(B)


def test_reads_back_what_the_same_request_stored() -> None:
    """Two requests with different accept lengths, read in another order: rows, tokens and states stay together."""
    pool = _pool()
    pool.store(torch.tensor([3, 1]), _block([2, 0], [10, 50]))
    read = pool.read(torch.tensor([1, 3]), _positions([51, 13]))
    assert read.bonus.tolist() == [101, 100]
    assert read.rejected.tolist() == [211, 203], "the drafted token at row a+1"
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
    """Padded rows of a CUDA graph read row 0: never relayed."""
    pool = _pool()
    pool.store(torch.tensor([1]), _block([0], [10]))
    read = pool.read(torch.tensor([1, 0, 0]), _positions([11, 0, 0]))
    assert read.mask[0].all() and not read.mask[1:].any()


def test_storage_does_not_alias_the_source() -> None:
    """I1: the host overwrites its captured states in the next forward."""
    pool = _pool()
    block = _block([0], [10])
    source = block.hidden.clone()
    pool.store(torch.tensor([1]), block._replace(hidden=source))
    source.fill_(-1.0)
    assert (pool.hidden[1] >= 0).all()


def test_read_tells_the_round_that_it_comes_from() -> None:
    """`a` where the stored round ends at the draft's first position, else nothing: also where some rows still fit."""
    pool = _pool()
    pool.store(torch.tensor([1, 2]), _block([2, 0], [10, 50]))
    assert pool.read(torch.tensor([2, 1, 3, 0]), _positions([51, 13, 9, 0])).accept_len.tolist() == [0, 2, EMPTY, EMPTY]
    assert pool.read(torch.tensor([2]), _positions([53])).accept_len.tolist() == [EMPTY]


def test_rounds_are_noted_by_slot() -> None:
    """Whatever the order of the batch; a reader owns what it gets."""
    pool = _pool()
    pool.store(torch.tensor([1, 3]), _block([2, 6], [10, 50]))
    pool.note_draft(torch.tensor([3, 1]), DraftRows(torch.tensor([5, 2]), torch.tensor([0, 1]), torch.tensor([1, -1])))
    rows = pool.last_rounds(torch.tensor([1, 3]))
    pool.note_draft(torch.tensor([1]), DraftRows(torch.tensor([0]), torch.tensor([0]), torch.tensor([0])))
    pool.store(torch.tensor([1]), _block([0], [13]))
    assert rows.tolist() == [[2, 1, -1, 2], [5, 0, 1, 6]]


def test_no_host_read_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """I6: storing, reading and invalidating never look at a value on the host."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("host read in the decode path")

    pool, indices, block, positions = _pool(), torch.tensor([1, 2]), _block([1, 7], [5, 9]), _positions([7, 17])
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    pool.store(indices, block)
    read = pool.read(indices, positions)
    pool.note_draft(indices, DraftRows(read.mask.sum(1), read.mask.sum(1), read.accept_len))
    pool.last_rounds(indices)
    pool.invalidate(indices)
    pool.set_enabled(True)
    pool.clear()


def test_empty_batch_is_a_no_op() -> None:
    pool = _pool()
    none = torch.empty((0,), dtype=torch.int64)
    pool.store(none, VerifiedBlock(torch.empty((0, B, H)), none, torch.empty((0, B), dtype=torch.int64), none, none))
    assert (pool.next_prefix_len == -1).all()


@pytest.mark.parametrize("stale_token", [False, True])
def test_nbytes_is_the_formula_of_the_docs(stale_token: bool) -> None:
    """And it counts every tensor of the pool: what it leaves out would be missing where memory is planned."""
    pool = _pool(stale_token=stale_token)
    assert pool.nbytes == ROWS * (B * H * 4 + 64 + 8 * B * stale_token) + 1
    assert pool.nbytes == sum(value.nbytes for value in vars(pool).values() if isinstance(value, torch.Tensor))


def test_256_requests_of_an_8b_target_stay_under_40_mb() -> None:
    """H = 4096, B = 16, bf16, with everything a pool can hold; allocated nowhere."""
    pool = RelayPool(
        num_rows=257,
        block_size=16,
        hidden_size=4096,
        rule=RelayRule.of(RelaySource.SUFFIX, shift_label=False),
        dtype=torch.bfloat16,
        device="meta",
        stale_token=True,
        use_kernels=True,
    )
    assert pool.nbytes < 40e6
