"""serving/rescore.py: the head's rows on one rank and on several, and the heads that it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflow.relay.alignment import RelayRule, RelaySource
from sglang_dflow.relay.pool import RelayPool
from sglang_dflow.relay.rescore import NONE, RelayRescorer
from sglang_dflow.serving.rescore import HeadRows, ServedRescorer, top_k

VOCAB, H = 10, 6


def _head(weight: torch.Tensor, first: int, count: int, added: int = 0) -> Any:
    shard = SimpleNamespace(org_vocab_start_index=first, num_org_elements=count, num_added_elements=added)
    return SimpleNamespace(weight=weight, shard_indices=shard, org_vocab_size=VOCAB)


def _ranks(count: int) -> Any:
    return SimpleNamespace(world_size=count, all_reduce=lambda part: part, all_gather=None)


def test_parts_of_the_vocabulary_sum_to_the_whole() -> None:
    """Catches a token that two ranks count, or none: each finds its own rows only, padding rows are nobody's."""
    weight, hidden = torch.randn(VOCAB, H), torch.randn(4, H)
    tokens = torch.tensor([[0, 3, NONE], [5, 6, 9], [9, 0, 5], [4, NONE, NONE]])
    whole = HeadRows(_head(weight, 0, VOCAB), _ranks(1)).logits(hidden, tokens)
    padded = [torch.cat((weight[part], torch.full((2, H), 1e6))) for part in (slice(0, 5), slice(5, 10))]
    parts = [HeadRows(_head(part, 5 * rank, 5), _ranks(2)).logits(hidden, tokens) for rank, part in enumerate(padded)]
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(whole[1], weight[[5, 6, 9]] @ hidden[1])


def test_the_best_of_all_parts_are_the_best_of_the_whole() -> None:
    """Catches a local id taken for a global one, padding rows among the best, and an order by rank."""
    weight, hidden = torch.randn(VOCAB, H), torch.randn(7, H)
    tokens, logits = HeadRows(_head(weight, 0, VOCAB), _ranks(1)).best(hidden, 3)
    expected = (hidden @ weight.T).topk(3)
    assert torch.equal(tokens, expected.indices)
    torch.testing.assert_close(logits, expected.values)
    padded = [torch.cat((weight[part], torch.full((2, H), 1e6))) for part in (slice(0, 5), slice(5, 10))]
    heads = [HeadRows(_head(part, 5 * rank, 5), _ranks(2)) for rank, part in enumerate(padded)]
    parts: list[list[torch.Tensor]] = []  # what each rank gathers: logits, then tokens
    for head in heads:
        sent: list[torch.Tensor] = []

        def keep(part: torch.Tensor, dim: int, sent: list[torch.Tensor] = sent) -> torch.Tensor:
            sent.append(part)
            return part

        head.group.all_gather = keep
        head.best(hidden, 3)
        parts.append(sent)
    gathered = iter([torch.cat(both, dim=-1) for both in zip(*parts)])
    heads[0].group.all_gather = lambda part, dim: next(gathered)
    assert torch.equal(heads[0].best(hidden, 3)[0], tokens)


@pytest.mark.parametrize("size", [256, 1024, 1030, 2560])
def test_top_k_by_parts_is_top_k(size: int) -> None:
    """Also where the largest stand in one part, and for sizes that are not made of parts."""
    logits = torch.randn(50, size)
    logits[:10, 3:9] += 100
    values, indices = top_k(logits, 4)
    expected = logits.topk(4)
    assert torch.equal(values, expected.values) and torch.equal(indices, expected.indices)


def test_a_head_that_every_rank_holds_is_not_summed() -> None:
    head = _head(torch.randn(VOCAB, H), 0, VOCAB)
    assert HeadRows(head, _ranks(4)).group is None


def test_codes_are_of_the_embedding_as_it_is() -> None:
    """Computed at start and by `refresh`, into the same storage, which a captured graph reads."""
    embedding, rescorer = torch.randn(VOCAB, H), RelayRescorer(4, H, 8, code_size=3)
    pool = RelayPool(
        num_rows=2, block_size=4, hidden_size=H, rule=RelayRule.of(RelaySource.SUFFIX, shift_label=False),
        dtype=torch.float32, device="cpu", stale_token=True, proposals=True,
    )  # fmt: skip
    head = HeadRows(_head(torch.randn(VOCAB, H), 0, VOCAB), _ranks(1))
    served = ServedRescorer(rescorer, pool, head, lambda ids: embedding[ids])
    tokens = torch.tensor([[0, 9], [NONE, 4]])
    storage = served.code_table.data_ptr()
    for _ in range(2):
        served.refresh()
        expected = rescorer.codes(embedding[tokens.clamp_min(0)])
        torch.testing.assert_close(served.codes(tokens)[tokens != NONE], expected[tokens != NONE])
        embedding.copy_(torch.randn(VOCAB, H))
    assert served.code_table.data_ptr() == storage


def test_heads_whose_rows_mean_something_else_are_refused() -> None:
    with pytest.raises(ValueError, match="has no dense weight. Set dflow_config.relay_rescore_size to 0"):
        HeadRows(_head(torch.zeros(VOCAB, H, dtype=torch.int8), 0, VOCAB), _ranks(1))
    with pytest.raises(ValueError, match="tokens added to it .2 here.*relay_rescore_size to 0"):
        HeadRows(_head(torch.zeros(VOCAB, H), 0, VOCAB, added=2), _ranks(1))
