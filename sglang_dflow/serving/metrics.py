"""What the relay does, counted on the host: totals, by reason, by position, and by request.

A verified round leaves one small tensor, which rides on the host's own asynchronous result copy as an auxiliary output
(`sglang.srt.managers.auxiliary_output`, 0.5.23): nothing is read in the decode path. `consume` runs in the scheduler
once the round's tokens are committed, right before they are streamed. A round of a request that had finished or was
retracted meanwhile commits nothing and is not counted.

Shown in `/server_info`, in `meta_info` (hooks/meta_info.py), in the log beside the host's decode line, and with
`--enable-metrics` in `/metrics`.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from sglang_dflow.relay.alignment import RelayRule

logger = logging.getLogger(__name__)

RELAYED_KEY = "dflow_relayed_rows"
"""Key of a request's `customized_info`: by output token, the relayed rows of the round that it opens, else None."""


class DropReason(enum.StrEnum):
    """Why a mask row of a draft took no relay."""

    NO_STATE = "no_state"
    """The first round after a prefill, retraction, flush or weight update; or the request advanced by other means."""
    NOTHING_REJECTED = "nothing_rejected"
    """No rejected row lies behind it: the run before accepted that far (all rows, on full acceptance)."""
    SWITCHED_OFF = "switched_off"
    """The relay is off by `dflow_relay`."""
    NON_FINITE = "non_finite"
    """Its relay held a NaN or an infinity."""


class Round(NamedTuple):
    """One verified block of one request, in the order of the columns that the worker sends.

    Attributes:
        relayed: rows that took a relay.
        non_finite: rows refused as not finite.
        source_accept_len: `a` of the round before, negative where the pool held none for this draft.
        accept_len: `a` of this round.
    """

    relayed: int
    non_finite: int
    source_accept_len: int
    accept_len: int

    def dropped(self, block_size: int, rule: RelayRule) -> dict[DropReason, int]:
        """Return the mask rows that took no relay, by reason; with `relayed` they are `block_size - 1`."""
        if self.source_accept_len < 0:
            return {DropReason.NO_STATE: block_size - 1}
        could = rule.num_rows(block_size, self.source_accept_len)
        return {
            DropReason.NOTHING_REJECTED: block_size - 1 - could,
            DropReason.SWITCHED_OFF: could - self.relayed - self.non_finite,
            DropReason.NON_FINITE: self.non_finite,
        }


@dataclass
class RelayCounts:
    """Sums over rounds.

    Attributes:
        block_size: `B`.
        rounds: verified blocks that committed tokens.
        tokens: tokens that they committed, bonus included.
        relayed_rows: mask rows that took a relay.
        dropped_rows: mask rows that took none, by reason.
        accepted: position `1 .. B-1` of a draft -> rounds that accepted it.
    """

    block_size: int
    rounds: int = 0
    tokens: int = 0
    relayed_rows: int = 0
    dropped_rows: Counter[DropReason] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)

    @property
    def eligible_rows(self) -> int:
        """Mask rows of all rounds."""
        return self.rounds * (self.block_size - 1)

    @property
    def hit_rate(self) -> float:
        return self.relayed_rows / self.eligible_rows if self.rounds else 0.0

    @property
    def tau(self) -> float:
        """Committed tokens per round, bonus included."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def add_round(self, one: Round, rule: RelayRule, *, tokens: int) -> None:
        self.rounds += 1
        self.tokens += tokens
        self.relayed_rows += one.relayed
        self.dropped_rows.update(one.dropped(self.block_size, rule))
        self.accepted.update(range(1, one.accept_len + 1))

    def add(self, other: RelayCounts) -> None:
        self.rounds += other.rounds
        self.tokens += other.tokens
        self.relayed_rows += other.relayed_rows
        self.dropped_rows.update(other.dropped_rows)
        self.accepted.update(other.accepted)

    def as_dict(self) -> dict[str, Any]:
        """What `/server_info` shows."""
        return {
            "rounds": self.rounds,
            "tau": self.tau,
            "relayed_rows": self.relayed_rows,
            "eligible_rows": self.eligible_rows,
            "relay_hit_rate": self.hit_rate,
            "dropped_rows": {reason.value: self.dropped_rows[reason] for reason in DropReason},
            "acceptance_by_position": [
                self.accepted[position] / self.rounds if self.rounds else 0.0 for position in range(1, self.block_size)
            ],
        }


class RelayMetrics:
    """The counters of one scheduler.

    Args:
        block_size: `B`.
        rule: the checkpoint's alignment.
        log_every: decode batches between two log lines; 0 never logs (other ranks than the logging one).
        export: called with the counts of every batch, or None (Prometheus is off).
    """

    def __init__(
        self,
        block_size: int,
        rule: RelayRule,
        *,
        log_every: int = 0,
        export: Callable[[RelayCounts], None] | None = None,
    ) -> None:
        self.block_size, self.rule = block_size, rule
        self.total = RelayCounts(block_size)
        self._since_log = RelayCounts(block_size)
        self._log_every, self._batches, self._export = log_every, 0, export

    @classmethod
    def of_this_scheduler(cls, block_size: int, rule: RelayRule) -> RelayMetrics:
        """Metrics that log and export where the host's own scheduler does."""
        from sglang.srt.runtime_context import get_observability, get_parallel

        observability, first_rank = get_observability(), get_parallel().attn_tp_rank == 0
        return cls(
            block_size,
            rule,
            log_every=observability.decode_log_interval if first_rank else 0,
            export=PrometheusExport(block_size) if observability.enable_metrics and first_rank else None,
        )

    def add_batch(self, counts: RelayCounts) -> None:
        """Take over the counts of one decode batch; log when it is time to."""
        self.total.add(counts)
        self._since_log.add(counts)
        if self._export is not None:
            self._export(counts)
        self._batches += 1
        if self._log_every and self._batches % self._log_every == 0:
            last, self._since_log = self._since_log, RelayCounts(self.block_size)
            logger.info(
                "DFLOW relay, last %d rounds: tau: %.2f, relay hit rate: %.2f, #non-finite rows: %d",
                last.rounds,
                last.tau,
                last.hit_rate,
                last.dropped_rows[DropReason.NON_FINITE],
            )


class RoundOutput(NamedTuple):
    """A batch's rounds on the device: the host's `DeviceAuxiliaryOutput`.

    Attributes:
        rows: int64 [bs, 4], the columns of `Round`; owned, it aliases no buffer of a CUDA graph.
        metrics: where they are counted.
    """

    rows: torch.Tensor
    metrics: RelayMetrics

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> HostRounds:
        """Start the host's asynchronous copy."""
        return HostRounds(copy_tensor(self.rows), self.metrics)


class HostRounds(NamedTuple):
    """The same rounds on the host, once the host's copy is done: its `HostAuxiliaryOutput`."""

    rows: torch.Tensor
    metrics: RelayMetrics

    def consume(self, batch: Any, commits: Sequence[Any | None]) -> None:
        """Count the rounds that committed tokens, and note them on their requests."""
        counts = RelayCounts(self.metrics.block_size)
        for req, commit, row in zip(batch.reqs, commits, self.rows.tolist(), strict=True):
            if commit is not None:
                one = Round(*row)
                counts.add_round(one, self.metrics.rule, tokens=len(commit.token_ids))
                _note_on_request(req, commit.output_index, one.relayed)
        self.metrics.add_batch(counts)


def _note_on_request(req: Any, output_index: int, relayed: int) -> None:
    """Write into the request's `customized_info`, a list by output token, which the host streams with the tokens."""
    if req.customized_info is None:
        req.customized_info = {}
    by_token = req.customized_info.setdefault(RELAYED_KEY, [])
    by_token += [None] * (len(req.output_ids) - len(by_token))
    by_token[output_index] = relayed


class PrometheusExport:
    """Counters on the host's `/metrics`. Made in the scheduler's process, where the host has set up multiprocessing."""

    def __init__(self, block_size: int) -> None:
        from prometheus_client import Counter as Metric
        from sglang.srt.runtime_context import get_parallel, get_serving

        labels = {"model_name": get_serving().served_model_name, "dp_rank": str(get_parallel().dp_rank or 0)}

        def counter(name: str, help_text: str, label: str | None = None) -> Any:
            metric = Metric(f"dflow:{name}", help_text, labelnames=[*labels, *([label] if label else [])])
            return metric if label else metric.labels(**labels)

        self._rounds = counter("rounds_total", "Verified blocks that committed tokens.")
        self._tokens = counter("committed_tokens_total", "Tokens that they committed, bonus included.")
        self._relayed = counter("relayed_rows_total", "Mask rows that took a relay.")
        self._eligible = counter("eligible_rows_total", "Mask rows of all verified blocks.")
        dropped = counter("dropped_rows_total", "Mask rows that took no relay, by reason.", "reason")
        accepted = counter("accepted_drafts_total", "Rounds that accepted the draft at this position.", "position")
        self._dropped = {reason: dropped.labels(**labels, reason=reason.value) for reason in DropReason}
        self._accepted = {
            position: accepted.labels(**labels, position=str(position)) for position in range(1, block_size)
        }

    def __call__(self, counts: RelayCounts) -> None:
        self._rounds.inc(counts.rounds)
        self._tokens.inc(counts.tokens)
        self._relayed.inc(counts.relayed_rows)
        self._eligible.inc(counts.eligible_rows)
        for reason, rows in counts.dropped_rows.items():
            self._dropped[reason].inc(rows)
        for position, rounds in counts.accepted.items():
            self._accepted[position].inc(rounds)
