"""What must hold of the answers, and of the server when all of them are in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import requests

from sglang_dflow.prompts import Prompt
from sglang_dflow.server import relay_state
from sglang_dflow.soak.client import Answer
from sglang_dflow.soak.workload import Request
from sglang_dflow.verify import TIE_NATS, Completion, explain_difference

Key = tuple[tuple[int, ...], str]
Expected = Mapping[Key, tuple[int, ...]]
"""Prompt and sampling parameters of a greedy request -> what the target alone answers."""


def key(request: Request) -> Key:
    """Identify a greedy request's answer: `n` answers to one prompt are all the same one."""
    return request.input_ids, repr(sorted((k, v) for k, v in request.sampling.items() if k != "n"))


@dataclass(frozen=True)
class Mismatch:
    """One answer that is not the target's; `tie` as in `sglang-dflow verify`."""

    request: Request
    expected: tuple[int, ...]
    found: tuple[int, ...]
    tie: bool = False

    def __str__(self) -> str:
        kind = "tie" if self.tie else "MISMATCH"
        same = next((i for i, (a, b) in enumerate(zip(self.expected, self.found)) if a != b), len(self.found))
        return f"{kind} in request {self.request.name}, from output token {same}: {self.request.sampling}"


def is_checked(request: Request, answer: Answer) -> bool:
    """True where the answer can be compared with the target's."""
    return request.is_greedy and answer.error is None and bool(answer.outputs)


def find_mismatches(
    expected: Expected, pairs: Iterable[tuple[Request, Answer]], *, tie_url: str | None = None
) -> list[Mismatch]:
    """Compare every greedy answer; one that was cut must be the beginning of the target's.

    Args:
        tie_url: a server of the target that is asked whether a difference is a numerical tie (float32).
    """
    found = []
    for request, answer in pairs:
        if not is_checked(request, answer):
            continue
        whole = expected[key(request)]
        for output in answer.outputs:
            wanted = whole[: len(output)] if answer.cut else whole
            if output != wanted:
                tie = tie_url is not None and _is_tie(tie_url, request, wanted, output)
                found.append(Mismatch(request, wanted, output, tie))
    return found


def _is_tie(url: str, request: Request, expected: tuple[int, ...], found: tuple[int, ...]) -> bool:
    return explain_difference(
        url,
        Prompt(id=request.name, text=""),
        request.input_ids,
        Completion(expected, 0),
        Completion(found, 1),
        tie_nats=TIE_NATS["float32"],
    ).tie


def server_problems(url: str) -> list[str]:
    """What is wrong with a server that answered everything: it must be healthy, idle and empty, and have relayed."""
    problems = []
    if requests.get(f"{url}/health_generate", timeout=120).status_code != 200:
        problems.append("it is not healthy")
    flushed = requests.post(f"{url}/flush_cache", params={"timeout": 20}, timeout=60)
    if flushed.status_code != 200:
        problems.append(f"it is not idle although everything was answered: {flushed.text[:200]}")
    loads = requests.get(f"{url}/v1/loads", timeout=60).json()["loads"]
    used = [load["num_used_tokens"] for load in loads]
    if any(used):
        problems.append(f"after a cache flush {used} KV slots are in use, expected none")
    relay = relay_state(url)
    if relay["relay_hit_rate"] <= 0.0:
        problems.append("no row was relayed")
    if relay["dropped_rows"]["non_finite"]:
        problems.append(f"{relay['dropped_rows']['non_finite']} relayed rows were not finite")
    counted = relay["relayed_rows"] + sum(relay["dropped_rows"].values())
    if counted != relay["eligible_rows"]:
        problems.append(f"{counted} rows were relayed or dropped, but {relay['eligible_rows']} were eligible")
    return problems


def metric_total(url: str, name: str) -> float:
    """Return the sum of a Prometheus counter over its labels; 0 if it was never counted."""
    lines = requests.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def slope_per_1000(samples: Sequence[tuple[int, float]]) -> float | None:
    """Least-squares slope of (requests, MB) over the second half of the requests, per 1,000 requests; None if too few.

    The first half is warm-up: pools, allocator arenas and compiled code fill in the beginning.
    """
    settled = [(x, y) for x, y in samples if x >= samples[-1][0] / 2]
    if len(settled) < 3:
        return None
    mean_x, mean_y = (sum(column) / len(settled) for column in zip(*settled))
    spread = sum((x - mean_x) ** 2 for x, _ in settled)
    return 1000 * sum((x - mean_x) * (y - mean_y) for x, y in settled) / spread if spread else None


def load_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """What the last line tells of the relay."""
    return {"tau": round(info["tau"], 4), "relay_hit_rate": round(info["relay_hit_rate"], 4)}
