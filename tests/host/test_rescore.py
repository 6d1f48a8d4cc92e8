"""serving/rescore.py: the head's rows on one rank and on several, and the heads that it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflow.relay.rescore import NONE
from sglang_dflow.serving.rescore import HeadRows

VOCAB, H = 10, 6


def _head(weight: torch.Tensor, first: int, count: int, added: int = 0) -> Any:
    shard = SimpleNamespace(org_vocab_start_index=first, num_org_elements=count, num_added_elements=added)
    return SimpleNamespace(weight=weight, shard_indices=shard, org_vocab_size=VOCAB)


def _ranks(count: int) -> Any:
    return SimpleNamespace(world_size=count, all_reduce=lambda part: part)


def test_parts_of_the_vocabulary_sum_to_the_whole() -> None:
    """Catches a token that two ranks count, or none: each finds its own rows only, padding rows are nobody's."""
    weight, hidden = torch.randn(VOCAB, H), torch.randn(4, H)
    tokens = torch.tensor([[0, 3, NONE], [5, 6, 9], [9, 0, 5], [4, NONE, NONE]])
    whole = HeadRows(_head(weight, 0, VOCAB), _ranks(1)).logits(hidden, tokens)
    padded = [torch.cat((weight[part], torch.full((2, H), 1e6))) for part in (slice(0, 5), slice(5, 10))]
    parts = [HeadRows(_head(part, 5 * rank, 5), _ranks(2)).logits(hidden, tokens) for rank, part in enumerate(padded)]
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(whole[1], weight[[5, 6, 9]] @ hidden[1])


def test_a_head_that_every_rank_holds_is_not_summed() -> None:
    head = _head(torch.randn(VOCAB, H), 0, VOCAB)
    assert HeadRows(head, _ranks(4)).group is None


def test_heads_whose_rows_mean_something_else_are_refused() -> None:
    with pytest.raises(ValueError, match="has no dense weight. Set dflow_config.relay_rescore_size to 0"):
        HeadRows(_head(torch.zeros(VOCAB, H, dtype=torch.int8), 0, VOCAB), _ranks(1))
    with pytest.raises(ValueError, match="tokens added to it .2 here.*relay_rescore_size to 0"):
        HeadRows(_head(torch.zeros(VOCAB, H), 0, VOCAB, added=2), _ranks(1))
