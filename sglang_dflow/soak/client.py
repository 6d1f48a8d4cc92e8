"""Sends a burst's requests, each in a thread of its own, as different clients would."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import requests

from sglang_dflow.soak.workload import Burst, Request


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        rid: the name that the server knew the request by (with `n > 1` its first answer); empty without an answer.
        outputs: token ids of every answer (`n` of them); of a request that was cut, as far as they were seen.
        cut: the client left, or the server reported the abort.
        error: why there is no answer; "timeout" is a hang.
        finished_by: what ended each output: "length", "stop" (a string), "token" (also the end of text) or "abort".
        bad: what is wrong with the answer's `meta_info`, or None.
    """

    rid: str = ""
    outputs: tuple[tuple[int, ...], ...] = ()
    cut: bool = False
    error: str | None = None
    finished_by: tuple[str, ...] = ()
    bad: str | None = None

    @property
    def hangs(self) -> bool:
        return self.error == "timeout"


def send_burst(url: str, burst: Burst, *, timeout_s: float) -> list[Answer]:
    """Answer all requests of a burst, each at its own time."""
    with ThreadPoolExecutor(max_workers=len(burst.requests)) as clients:
        return list(clients.map(lambda request: send(url, request, timeout_s=timeout_s), burst.requests))


def send(url: str, request: Request, *, timeout_s: float, rid: str | None = None) -> Answer:
    """Send one request, named `rid` or by chance, and behave as it says."""
    time.sleep(request.delay_s)
    try:
        if request.abort_after_s is not None:
            return _send_and_abort(url, request, timeout_s)
        return _exchange(url, request, rid or uuid.uuid4().hex, timeout_s)
    except requests.Timeout:
        return Answer(error="timeout")
    except requests.RequestException as error:
        return Answer(error=f"{type(error).__name__}: {error}")


def _send_and_abort(url: str, request: Request, timeout_s: float) -> Answer:
    name = uuid.uuid4().hex
    with ThreadPoolExecutor(max_workers=1) as second:
        waiting = second.submit(_exchange, url, request, name, timeout_s)
        time.sleep(request.abort_after_s or 0.0)
        requests.post(f"{url}/abort_request", json={"rid": name}, timeout=timeout_s).raise_for_status()
        return waiting.result()


def _exchange(url: str, request: Request, name: str, timeout_s: float) -> Answer:
    body: dict[str, Any] = {
        "rid": name,
        "input_ids": list(request.input_ids),
        "sampling_params": request.sampling,
        "stream": request.stream,
        "return_logprob": request.logprobs,
    }
    if request.sampling.get("n", 1) > 1:
        del body["rid"]  # the host wants a list of them
    with requests.post(f"{url}/generate", json=body, stream=request.stream, timeout=timeout_s) as response:
        if response.status_code != 200:
            return Answer(error=f"{response.status_code}: {response.text[:300]}")
        if not request.stream:
            return _answer(response.json())
        chunk: dict[str, Any] = {}
        for number, chunk in enumerate(_chunks(response), start=1):
            if "error" in chunk:
                return Answer(error=str(chunk["error"]))
            if number == request.leave_after:
                return Answer(rid=name, outputs=(tuple(chunk["output_ids"]),), cut=True)
        return _answer(chunk)


def _chunks(response: requests.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith(b"data:") and line != b"data: [DONE]":
            yield json.loads(line[5:])


def _answer(body: Any) -> Answer:
    parts: Sequence[dict[str, Any]] = body if isinstance(body, list) else [body]
    meta = [part["meta_info"] for part in parts]
    return Answer(
        rid=meta[0]["id"],
        outputs=tuple(tuple(part["output_ids"]) for part in parts),
        cut="abort" in [info["finish_reason"]["type"] for info in meta],
        finished_by=tuple(_finished_by(info["finish_reason"]) for info in meta),
        bad=next(filter(None, map(_meta_problem, meta)), None),
    )


def _finished_by(reason: dict[str, Any]) -> str:
    is_token = reason["type"] == "stop" and isinstance(reason.get("matched"), int)
    return "token" if is_token else str(reason["type"])


def _meta_problem(info: dict[str, Any]) -> str | None:
    """What a request's own counters must fulfil with a relay that is on or off."""
    rate = info.get("relay_hit_rate")
    if rate is not None and not 0.0 <= rate < 1.0:
        return f"relay_hit_rate is {rate}"
    return None
