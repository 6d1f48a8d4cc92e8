"""What a measurement of acceptance is made of, and how sure it is.

Owns the outcome of speculation per conversation, tau over many, and the bootstrap: intervals come from resampling
prompts, the unit that is independent. Arms that answered the same prompts are resampled together, so the interval of
their ratio is a paired one. The intervals say what other prompts of the same kind would give, not what another
training run would.

tau is committed tokens per verification of the target, the bonus included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

DRAWS = 5000
"""Resamples of a bootstrap: the ends of a 95 % interval then rest on 125 of them each."""


class Outcome(NamedTuple):
    """Speculation in one conversation.

    Attributes:
        id: of its prompt.
        tokens: committed tokens.
        rounds: verifications.
        histogram: rounds that accepted 0, 1, .. drafts; may be shorter than the block. None if not known.
    """

    id: str
    tokens: int
    rounds: int
    histogram: tuple[int, ...] | None


class Interval(NamedTuple):
    """A 95 % interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Acceptance:
    """Outcome of one arm on one prompt set.

    Attributes:
        outcomes: one per conversation; conversations without a round count for nothing.
        block_size: ``B``, anchor included.
        relayed_rows: mask rows that took a relay, over all rounds.
        mask_rows: mask rows of all rounds, ``rounds * (B - 1)``.
        relayed_rounds: share of rounds with at least one relayed row; None where it was not counted.
    """

    outcomes: tuple[Outcome, ...]
    block_size: int
    relayed_rows: int = 0
    mask_rows: int = 0
    relayed_rounds: float | None = None

    @property
    def rounds(self) -> int:
        """Verifications in all conversations."""
        return sum(outcome.rounds for outcome in self.outcomes)

    @property
    def tau(self) -> float:
        """Committed tokens per verification, over all rounds of all conversations."""
        return sum(outcome.tokens for outcome in self.outcomes if outcome.rounds) / max(self.rounds, 1)

    @property
    def hit_rate(self) -> float:
        """Relayed rows per mask row."""
        return self.relayed_rows / self.mask_rows if self.mask_rows else 0.0

    @property
    def by_depth(self) -> list[float] | None:
        """Share of rounds that accepted at least ``t`` drafts, ``t = 1 .. B-1``; None where it was not told."""
        counted = [outcome.histogram for outcome in self.outcomes if outcome.histogram is not None]
        total = sum(map(sum, counted))
        if not total:
            return None
        return [sum(sum(h[depth:]) for h in counted) / total for depth in range(1, self.block_size)]


def tau_draws(arms: Sequence[Acceptance], generator: torch.Generator, draws: int = DRAWS) -> torch.Tensor:
    """tau of every arm [arms, draws] under resampled prompts, each resample shared by all arms.

    Raises:
        ValueError: the arms did not answer the same prompts in the same order.
    """
    ids = [[outcome.id for outcome in arm.outcomes] for arm in arms]
    if any(other != ids[0] for other in ids[1:]) or not ids[0]:
        raise ValueError("the arms answered different prompts, or none; a paired interval needs the same in each.")
    counts = torch.tensor(
        [[(o.tokens if o.rounds else 0, o.rounds) for o in arm.outcomes] for arm in arms],
        dtype=torch.float64,
        device="cpu",
    )  # [arms, n, 2]
    picks = torch.randint(len(ids[0]), (draws, len(ids[0])), generator=generator, device="cpu")  # [draws, n]
    tokens, rounds = counts[:, picks].sum(2).unbind(-1)  # [arms, draws] each
    return tokens / rounds.clamp_min(1)


def interval(draws: torch.Tensor) -> Interval:
    """The middle 95 % of resampled values [draws]."""
    low, high = torch.quantile(draws, draws.new_tensor([0.025, 0.975])).tolist()
    return Interval(low, high)


class ArmSummary(NamedTuple):
    """tau of one arm, on one set or over all of them."""

    tau: float
    interval: Interval


class RatioSummary(NamedTuple):
    """tau with the relay over tau without."""

    ratio: float
    interval: Interval


class Summary(NamedTuple):
    """One line of the result: a set, or the mean over sets."""

    arms: dict[str, ArmSummary]
    ratio: RatioSummary | None  # None unless both "relay_off" and "relay_on" were measured


def summarise(
    sets: Mapping[str, Mapping[str, Acceptance]], seed: int = 0, draws: int = DRAWS
) -> tuple[dict[str, Summary], Summary]:
    """Summaries of set -> arm -> measurement: one per set, and that of the unweighted mean over the sets.

    The ratio of the mean is the ratio of the two mean taus.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    names = list(next(iter(sets.values())))
    by_set: dict[str, Summary] = {}
    taus: list[torch.Tensor] = []  # [arms] each
    drawn: list[torch.Tensor] = []  # [arms, draws] each
    for name, arms in sets.items():
        taus.append(torch.tensor([arms[arm].tau for arm in names], dtype=torch.float64, device="cpu"))
        drawn.append(tau_draws([arms[arm] for arm in names], generator, draws))
        by_set[name] = _summary(names, taus[-1], drawn[-1])
    return by_set, _summary(names, torch.stack(taus).mean(0), torch.stack(drawn).mean(0))


def _summary(names: Sequence[str], taus: torch.Tensor, draws: torch.Tensor) -> Summary:
    arms = {name: ArmSummary(float(taus[i]), interval(draws[i])) for i, name in enumerate(names)}
    if not {"relay_off", "relay_on"} <= set(names):
        return Summary(arms, None)
    off, on = names.index("relay_off"), names.index("relay_on")
    return Summary(arms, RatioSummary(float(taus[on] / taus[off]), interval(draws[on] / draws[off])))
