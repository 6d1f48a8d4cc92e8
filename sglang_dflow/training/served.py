"""Acceptance of a running server, whatever it drafts with: requests in, the host's own counters out.

Relies on SGLang 0.5.23's ``meta_info`` of a finished request: ``completion_tokens``, ``spec_verify_ct`` and
``spec_correct_drafts_histogram`` (rounds that accepted 0, 1, .. drafts). tau is completion tokens per verification, as
the host defines it: the prefill's token is among them, so it is higher than in a replay by one token a conversation.

A DFLOW server's relay is switched at run time and its counters are read from ``/server_info``: a hit rate is that of
all traffic in between, so measure on an idle server. At temperature > 0 the server draws its own text in each arm
(speculative verification ignores per-request seeds): same prompts, not the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from sglang_dflow.server import post, relay_state, server_info, set_relay
from sglang_dflow.training.acceptance import Acceptance, Outcome


class ServedDrafter:
    """The drafter of a running server."""

    def __init__(self, url: str) -> None:
        """Ask the server what it runs.

        Raises:
            ValueError: it does not speculate.
        """
        self.url = url.rstrip("/")
        self.info = server_info(self.url)
        self.algorithm = self.info.get("speculative_algorithm")
        if self.algorithm is None:
            raise ValueError(f"{url} serves without speculation; expected --speculative-algorithm DFLOW or another.")
        self.block_size = int(self.info["speculative_num_draft_tokens"])

    @property
    def has_relay(self) -> bool:
        """True for DFLOW, unless its relay was switched off at start."""
        return self.algorithm == "DFLOW" and "pool_bytes" in relay_state(self.url)

    @contextmanager
    def relay_restored(self) -> Iterator[None]:
        """Leave the relay's switch as it was found."""
        if not self.has_relay:
            yield
            return
        before = relay_state(self.url)["relay"] == "on"
        try:
            yield
        finally:
            set_relay(self.url, before)

    def measure(
        self,
        prompts: Sequence[tuple[str, list[int]]],  # (id, token ids)
        *,
        relay: bool,
        temperature: float,
        max_new_tokens: int,
        concurrency: int,
        progress: Callable[[int], None] = lambda done: None,
    ) -> Acceptance:
        """Answer all prompts, ``concurrency`` at a time, with the relay on or off.

        Raises:
            ValueError: ``relay`` and the server has none.
            RuntimeError: the server refused a request, or verified nothing.
        """
        if relay and not self.has_relay:
            raise ValueError(f"{self.url} runs {self.algorithm} without a relay; expected DFLOW with its relay on.")
        has_relay = self.has_relay
        if has_relay:
            set_relay(self.url, relay)
        before = relay_state(self.url) if has_relay else {}
        sampling = {"temperature": temperature, "max_new_tokens": max_new_tokens}
        outcomes: list[Outcome] = []
        with ThreadPoolExecutor(max_workers=concurrency) as workers:
            for outcome in workers.map(lambda prompt: self._answer(prompt[0], prompt[1], sampling), prompts):
                outcomes.append(outcome)
                progress(len(outcomes))
        after = relay_state(self.url) if has_relay else {}
        if not any(outcome.rounds for outcome in outcomes):
            raise RuntimeError(f"{self.url} verified no block in {len(prompts)} requests: nothing was measured.")
        rows = {name: after.get(name, 0) - before.get(name, 0) for name in ("relayed_rows", "eligible_rows")}
        return Acceptance(tuple(outcomes), self.block_size, rows["relayed_rows"], rows["eligible_rows"])

    def _answer(self, name: str, ids: list[int], sampling: dict[str, Any]) -> Outcome:
        info = post(self.url, "/generate", {"input_ids": ids, "sampling_params": sampling})["meta_info"]
        histogram = info.get("spec_correct_drafts_histogram")
        return Outcome(
            id=name,
            tokens=int(info["completion_tokens"]),
            rounds=int(info.get("spec_verify_ct", 0)),
            histogram=None if histogram is None else tuple(map(int, histogram)),
        )
