"""cpu/cache_locs.py against plain loops."""

from __future__ import annotations

import torch

from sglang_dflow.cpu.cache_locs import assign_req_to_token_pool, extend_cache_locs


def table() -> torch.Tensor:
    """A request-to-token table whose entries name their own row and column."""
    return (torch.arange(4).unsqueeze(1) * 100 + torch.arange(10)).to(torch.int32)


def test_extend_cache_locs_reads_each_request_from_its_own_length() -> None:
    """Catches requests or offsets mixed up, and a row-minor result."""
    start = torch.tensor([0, 5])
    found = extend_cache_locs(
        req_pool_indices=torch.tensor([3, 1]),
        req_to_token=table(),
        start_offset=start,
        end_offset=start + 3,
        batch_size=2,
        draft_token_num=3,
        device="cpu",
    )
    assert found.tolist() == [300, 301, 302, 105, 106, 107]
    assert found.dtype == torch.int64


def test_extend_cache_locs_past_the_table_gives_the_padding_slot() -> None:
    """Catches a block at the end of the context writing over the last real token."""
    start = torch.tensor([8])
    found = extend_cache_locs(
        req_pool_indices=torch.tensor([2]),
        req_to_token=table(),
        start_offset=start,
        end_offset=start + 4,
        batch_size=1,
        draft_token_num=4,
        device="cpu",
    )
    assert found.tolist() == [208, 209, 0, 0]


def test_assign_writes_packed_slots_of_different_lengths() -> None:
    """Catches the running offset of the packed slots, an empty request in the middle included."""
    tokens = table()
    expected = tokens.clone()
    slots = torch.tensor([11, 12, 13, 21, 22], dtype=torch.int64)
    rows, start, end = [2, 0, 3], [1, 4, 8], [4, 4, 10]
    position = 0
    for row, first, last in zip(rows, start, end, strict=True):
        for column in range(first, last):
            expected[row, column] = int(slots[position])
            position += 1
    assign_req_to_token_pool(torch.tensor(rows), tokens, torch.tensor(start), torch.tensor(end), slots, batch_size=3)
    assert torch.equal(tokens, expected)
