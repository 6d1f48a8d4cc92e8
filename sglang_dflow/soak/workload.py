"""The workload as data: from a seed to bursts of requests, all of it decided before the first one is sent.

Reaches, on purpose, every life of a request: arrivals while others decode, prompts of 1 to 2,000 tokens, shared
prefixes (radix hits), short and long answers, stop strings and tokens inside accepted runs, several answers to one
prompt, streams, clients that leave, aborts, cache flushes, and the relay switched off and on; now and then a burst
whose answers outgrow the KV pool (`command.py` sizes it), so that requests are retracted.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_PROMPT = 2000
_STOP_STRINGS = (".", "\n", ",", " the", "\n\n", "of", "1")
_NUM_PREFIXES = 8
_PRESSURE_SIZE = 24


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        name: unique in its workload.
        input_ids: the prompt.
        sampling: the host's `sampling_params`.
        delay_s: seconds after its burst's start.
        stream: whether the answer is streamed.
        logprobs: whether log-probabilities are asked for.
        leave_after: the client disconnects after so many chunks of the stream; None stays.
        abort_after_s: `/abort_request` so many seconds after sending; None never.
    """

    name: str
    input_ids: tuple[int, ...]
    sampling: dict[str, Any]
    delay_s: float = 0.0
    stream: bool = False
    logprobs: bool = False
    leave_after: int | None = None
    abort_after_s: float | None = None

    @property
    def is_greedy(self) -> bool:
        return float(self.sampling["temperature"]) == 0.0

    @property
    def is_cut(self) -> bool:
        """True if the client does not wait for the end."""
        return self.leave_after is not None or self.abort_after_s is not None

    def whole(self) -> Request:
        """The same prompt and parameters, answered once and in one piece: what the reference server is asked."""
        sampling = {name: value for name, value in self.sampling.items() if name != "n"}
        return Request(self.name, self.input_ids, sampling)


@dataclass(frozen=True)
class Burst:
    """Requests that arrive together.

    Attributes:
        requests: at least one.
        flush: the cache of the idle server is flushed before them.
        relay: the relay is switched on or off while they run; None leaves it.
    """

    requests: tuple[Request, ...]
    flush: bool = False
    relay: bool | None = None


@dataclass
class _Maker:
    """Draws requests. `corpus`: token ids of real text, at least `MAX_PROMPT` of them."""

    seed: int
    corpus: Sequence[int]
    random: random.Random = field(init=False)
    prefixes: list[tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.prefixes = [self._text(self._log_uniform(16, 400)) for _ in range(_NUM_PREFIXES)]

    def _log_uniform(self, low: int, high: int) -> int:
        return round(math.exp(self.random.uniform(math.log(low), math.log(high))))

    def _chance(self, share: float) -> bool:
        return self.random.random() < share

    def _text(self, length: int) -> tuple[int, ...]:
        start = self.random.randrange(len(self.corpus) - length + 1)
        return tuple(self.corpus[start : start + length])

    def _prompt(self) -> tuple[int, ...]:
        # Mostly short: the soak wants many requests, and 2,000-token prompts cost seconds on a CPU.
        length = self._log_uniform(1, MAX_PROMPT if self._chance(0.08) else 100)
        prefix = self.random.choice(self.prefixes) if self._chance(0.3) else ()
        return (*prefix, *self._text(length))[:MAX_PROMPT]

    def _sampling(self) -> dict[str, Any]:
        sampling: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": self._log_uniform(1, 48)}
        if self._chance(0.3):
            sampling |= {
                "temperature": self.random.choice((0.6, 1.0, 1.3)),
                "top_p": self.random.choice((0.8, 1.0)),
                "top_k": self.random.choice((-1, 20)),
            }
        if self._chance(0.15):
            sampling["stop"] = self.random.sample(_STOP_STRINGS, 2)
        elif self._chance(0.1):
            sampling["stop_token_ids"] = self.random.sample(list(self.corpus), 8)
        elif self._chance(0.4):
            sampling["ignore_eos"] = True
        if self._chance(0.06):
            sampling["n"] = self.random.choice((2, 3))
        return sampling

    def burst_size(self) -> int:
        # Mostly large: a server with few requests spends its time on rounds of one row.
        return self._log_uniform(8, 32) if self._chance(0.8) else self._log_uniform(1, 4)

    def request(self, name: str) -> Request:
        sampling = self._sampling()
        stream = "n" not in sampling and self._chance(0.35)
        leaves = stream and self._chance(0.25)
        aborts = "n" not in sampling and not leaves and self._chance(0.06)
        return Request(
            name=name,
            input_ids=self._prompt(),
            sampling=sampling,
            delay_s=round(self.random.expovariate(2.0), 3) if self._chance(0.7) else 0.0,
            stream=stream,
            logprobs=self._chance(0.08),
            leave_after=self.random.choice((1, 2, 5)) if leaves else None,
            abort_after_s=round(self.random.uniform(0.0, 2.0), 3) if aborts else None,
        )

    def pressure(self, number: int, size: int) -> Burst:
        """Requests that are all admitted when they arrive, and outgrow 2,304 slots together.

        Without `ignore_eos`, for which the host keeps room from the start.
        """
        sampling = {"temperature": 0.0, "max_new_tokens": 96}
        return Burst(tuple(Request(f"{number}.{index}", self._text(60), sampling) for index in range(size)))

    def burst(self, number: int, size: int) -> Burst:
        requests = tuple(self.request(f"{number}.{index}") for index in range(size))
        if self._chance(0.3):  # one prompt asked by several at once
            requests = tuple(dataclasses.replace(one, input_ids=requests[0].input_ids) for one in requests)
        # Off for a while now and then, never for the whole soak.
        relay = {3: False, 4: True}.get(number % 8)
        return Burst(requests, flush=number > 0 and self._chance(0.3), relay=relay)


def make_workload(seed: int, count: int, corpus: Sequence[int]) -> list[Burst]:
    """Draw `count` requests in bursts of 1 to 32.

    Raises:
        ValueError: the corpus is shorter than the longest prompt.
    """
    if len(corpus) < MAX_PROMPT:
        raise ValueError(f"the corpus has {len(corpus)} tokens, expected at least {MAX_PROMPT}")
    maker, left = _Maker(seed, corpus), count
    bursts: list[Burst] = []
    while left:
        is_pressure = len(bursts) % 32 == 5
        size = min(left, _PRESSURE_SIZE if is_pressure else maker.burst_size())
        bursts.append((maker.pressure if is_pressure else maker.burst)(len(bursts), size))
        left -= size
    return bursts


def to_json(bursts: Sequence[Burst]) -> list[dict[str, Any]]:
    """For a file that `from_json` reads back."""
    return [dataclasses.asdict(burst) for burst in bursts]


def from_json(entries: Sequence[dict[str, Any]]) -> list[Burst]:
    """Read what `to_json` made and JSON carried."""

    def request(entry: dict[str, Any]) -> Request:
        return Request(**{**entry, "input_ids": tuple(entry["input_ids"])})

    return [Burst(**{**entry, "requests": tuple(map(request, entry["requests"]))}) for entry in entries]
