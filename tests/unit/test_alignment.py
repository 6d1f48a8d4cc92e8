"""relay/alignment.py: which verifier row serves which draft row."""

from __future__ import annotations

import pytest
import torch

from sglang_dflow.relay.alignment import RelayRule, RelaySource, relay_rows

RULES = [(source, shift_label) for source in RelaySource for shift_label in (False, True)]


def _expected(block_size: int, accept_len: int, source: RelaySource, shift_label: bool) -> dict[int, int]:
    """Next-block row -> source row, from what each side predicts, spelled out for one request.

    The target's row j predicts the token at P+j+1. With P' = P+a+1 the drafter's row t predicts the one at P'+t, or
    at P'+t+1 with shift_label. The anchor row takes no relay.
    """
    prefix, pairs = 100, {}
    next_prefix = prefix + accept_len + 1
    first = accept_len + (2 if source is RelaySource.SUFFIX else 1)
    for j in range(first, block_size):
        for t in range(1, block_size):
            if next_prefix + t + int(shift_label) == prefix + j + 1:
                pairs[t] = j
    return pairs


@pytest.mark.parametrize("block_size", [2, 7, 8, 16])
@pytest.mark.parametrize(("source", "shift_label"), RULES)
def test_rows_serve_the_same_token(block_size: int, source: RelaySource, shift_label: bool) -> None:
    """Catches a shift by one in either direction, for every accept length, full acceptance included."""
    rule = RelayRule.of(source, shift_label=shift_label)
    for accept_len in range(block_size):
        next_prefix = 100 + accept_len + 1
        rows = relay_rows(
            (next_prefix + torch.arange(block_size)).unsqueeze(0),
            torch.tensor([[next_prefix]]),
            torch.tensor([[accept_len]]),
            block_size=block_size,
            rule=rule,
        )
        found = {t: int(rows.source[0, t]) for t in range(block_size) if rows.mask[0, t]}
        expected = _expected(block_size, accept_len, source, shift_label)
        assert found == expected


def test_table_of_the_method() -> None:
    """The two rules of the method page, block 8, two drafts accepted: rows 2..5 from 4..7, and 1..5 from 3..7."""
    positions = torch.arange(13, 21).unsqueeze(0)  # P = 10, a = 2, P' = 13
    for source, expected in ((RelaySource.SUFFIX, [2, 3, 4, 5]), (RelaySource.FIRST_REJECTION, [1, 2, 3, 4, 5])):
        rule = RelayRule.of(source, shift_label=False)
        rows = relay_rows(positions, torch.tensor([[13]]), torch.tensor([[2]]), block_size=8, rule=rule)
        assert rows.mask[0].nonzero().flatten().tolist() == expected
        assert rows.source[0, expected].tolist() == [t + 2 for t in expected]


def test_empty_row_and_moved_window() -> None:
    """An empty pool row relays nothing; a request that advanced by two more finds only what is still covered."""
    rule = RelayRule.of(RelaySource.FIRST_REJECTION, shift_label=False)
    positions = torch.arange(15, 23).unsqueeze(0)
    empty = relay_rows(positions, torch.tensor([[-1]]), torch.tensor([[2]]), block_size=8, rule=rule)
    assert not empty.mask.any()
    moved = relay_rows(positions, torch.tensor([[13]]), torch.tensor([[2]]), block_size=8, rule=rule)
    # Absolute positions 14..18 were covered; the block now starts at 15.
    assert positions[0][moved.mask[0]].tolist() == [15, 16, 17, 18]
    behind = relay_rows(positions - 10, torch.tensor([[13]]), torch.tensor([[2]]), block_size=8, rule=rule)
    assert not behind.mask[0, positions[0] - 10 <= 13].any()
