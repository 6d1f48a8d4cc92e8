"""serving/metrics.py: every mask row of a round is accounted for, once, by the right reason."""

from __future__ import annotations

import logging

import pytest

from sglang_dflow.relay.alignment import RelayRule, RelaySource
from sglang_dflow.server import together
from sglang_dflow.serving.metrics import DropReason, RelayCounts, RelayMetrics, Round

B = 8
RULE = RelayRule.of(RelaySource.FIRST_REJECTION, shift_label=False)
SUFFIX = RelayRule.of(RelaySource.SUFFIX, shift_label=False)


@pytest.mark.parametrize(
    ("one", "rule", "expected"),
    [
        (Round(0, 0, -1, 3), RULE, {DropReason.NO_STATE: 7}),
        (Round(7, 0, 0, 3), RULE, {}),
        (Round(5, 0, 2, 3), RULE, {DropReason.NOTHING_REJECTED: 2}),
        (Round(0, 0, 7, 3), RULE, {DropReason.NOTHING_REJECTED: 7}),
        (Round(0, 0, 2, 3), RULE, {DropReason.NOTHING_REJECTED: 2, DropReason.SWITCHED_OFF: 5}),
        (Round(3, 2, 2, 3), RULE, {DropReason.NOTHING_REJECTED: 2, DropReason.NON_FINITE: 2}),
        (Round(4, 0, 2, 3), SUFFIX, {DropReason.NOTHING_REJECTED: 3}),
        (Round(0, 0, 6, 3), SUFFIX, {DropReason.NOTHING_REJECTED: 7}),
    ],
)
def test_rows_by_reason(one: Round, rule: RelayRule, expected: dict[DropReason, int]) -> None:
    dropped = one.dropped(B, rule)
    assert {reason: rows for reason, rows in dropped.items() if rows} == expected
    assert one.relayed + sum(dropped.values()) == B - 1


def test_totals_and_log_line(caplog: pytest.LogCaptureFixture) -> None:
    """tau, hit rate and acceptance by position of two batches; one line after the second, then from zero again."""
    exported: list[RelayCounts] = []
    metrics = RelayMetrics(B, RULE, log_every=2, export=exported.append)
    with caplog.at_level(logging.INFO, logger="sglang_dflow.serving.metrics"):
        for one, tokens in ((Round(7, 0, 0, 1), 2), (Round(0, 0, -1, 3), 1)):
            counts = RelayCounts(B)
            counts.add_round(one, RULE, tokens=tokens)
            metrics.add_batch(counts)
        metrics.add_batch(RelayCounts(B))
    assert [record.getMessage() for record in caplog.records] == [
        "DFLOW relay, last 2 rounds: tau: 1.50, relay hit rate: 0.50, #non-finite rows: 0"
    ]
    shown = metrics.total.as_dict()
    assert (shown["rounds"], shown["tau"], shown["relay_hit_rate"]) == (2, 1.5, 0.5)
    assert (shown["relayed_rows"], shown["eligible_rows"]) == (7, 14)
    assert shown["dropped_rows"] == {"no_state": 7, "nothing_rejected": 0, "switched_off": 0, "non_finite": 0}
    assert shown["acceptance_by_position"] == [1.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert [counts.rounds for counts in exported] == [1, 1, 0]


def test_nothing_counted_yet() -> None:
    """No division by zero in `/server_info` of a fresh server."""
    shown = RelayCounts(B).as_dict()
    assert (shown["tau"], shown["relay_hit_rate"], shown["eligible_rows"]) == (0.0, 0.0, 0)
    assert shown["acceptance_by_position"] == [0.0] * 7


def test_ranks_together_are_what_one_would_have_counted() -> None:
    """Data-parallel ranks each show their own counters; the mean of two taus is not the tau of both."""
    ranks = [RelayCounts(B), RelayCounts(B)]
    ranks[0].add_round(Round(7, 0, 0, 1), RULE, tokens=2)
    for _ in range(3):
        ranks[1].add_round(Round(3, 0, 4, 5), RULE, tokens=6)
    shown = [{"relay": "on", "pool_bytes": 10, **counts.as_dict()} for counts in ranks]
    ranks[0].add(ranks[1])
    assert together(shown) == {"relay": "on", "pool_bytes": 20, **ranks[0].as_dict()}
    assert together([{"relay": "off"}, {"relay": "off"}]) == {"relay": "off"}
