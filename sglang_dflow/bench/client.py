"""The client of the sweep: greedy requests over the OpenAI completions API, streamed and timed.

SGLang's own client (`sglang.benchmark.serving`, 0.5.23) cannot take this part: it keeps neither token ids nor verify
counts, and it fails a request whose stream has a chunk without choices, which is where the server puts both the usage
and the speculation details. Times are defined as it defines them: TTFT is the first chunk with a token, TPOT is
(latency - TTFT) / (tokens - 1), throughput is all output tokens over the time from the first request to the last
answer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

_TIMEOUT = aiohttp.ClientTimeout(total=3600)


@dataclass(frozen=True)
class Request:
    """One answered request.

    Attributes:
        output_ids: the answer's tokens.
        ttft_s: seconds to the first token.
        latency_s: seconds to the end of the stream.
        rounds: verifications of the target, 0 without speculation.
        histogram: rounds that accepted 0, 1, .. drafts; empty without speculation.
    """

    output_ids: list[int]
    ttft_s: float
    latency_s: float
    rounds: int = 0
    histogram: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.output_ids)

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for a single token."""
        return (self.latency_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else None

    def record(self) -> dict[str, Any]:
        """JSON; `Request(**record)` gives it back."""
        times = {"ttft_s": round(self.ttft_s, 5), "latency_s": round(self.latency_s, 5)}
        return asdict(self) | times | {"histogram": list(self.histogram)}


@dataclass(frozen=True)
class Load:
    """All requests of one point, in the order of the prompts, and the seconds that they took together."""

    requests: list[Request]
    seconds: float


def drive(
    url: str,
    prompts_ids: Sequence[Sequence[int]],
    *,
    concurrency: int,
    max_new_tokens: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Load:
    """Answer all prompts, `concurrency` at a time.

    Raises:
        RuntimeError: the server is gone, refused a request, or told another number of tokens than it sent.
    """
    try:
        return asyncio.run(_drive(url, prompts_ids, concurrency, max_new_tokens, progress))
    except aiohttp.ClientError as error:
        raise RuntimeError(f"{url} does not answer any more: {error!r}") from error


async def _drive(
    url: str,
    prompts_ids: Sequence[Sequence[int]],
    concurrency: int,
    max_new_tokens: int,
    progress: Callable[[int], None],
) -> Load:
    slots = asyncio.Semaphore(concurrency)
    done = 0
    async with aiohttp.ClientSession(timeout=_TIMEOUT, read_bufsize=2**22) as session:

        async def answer(ids: Sequence[int]) -> Request:
            nonlocal done
            async with slots:
                request = await _stream(session, url, ids, max_new_tokens)
            done += 1
            progress(done)
            return request

        began = time.perf_counter()
        requests = await asyncio.gather(*map(answer, prompts_ids))
        seconds = time.perf_counter() - began
    return Load(list(requests), seconds)


async def _stream(session: aiohttp.ClientSession, url: str, ids: Sequence[int], max_new_tokens: int) -> Request:
    body = {
        "model": "default",
        "prompt": list(ids),
        "temperature": 0.0,
        "max_tokens": max_new_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "return_spec_tokens_details": True,
    }
    began = time.perf_counter()
    output_ids: list[int] = []
    ttft_s, told = 0.0, None
    details: dict[str, Any] = {}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(f"{url} broke off an answer: {chunk['error']}")
            for choice in chunk["choices"]:
                if choice.get("token_ids"):
                    ttft_s = ttft_s or time.perf_counter() - began
                    output_ids += choice["token_ids"]
            details = (chunk.get("sglext") or {}).get("spec_tokens_details") or details
            told = (chunk.get("usage") or {}).get("completion_tokens", told)
    latency_s = time.perf_counter() - began
    if told != len(output_ids):
        raise RuntimeError(f"{url} told {told} completion tokens but streamed {len(output_ids)}")
    return Request(
        output_ids,
        ttft_s,
        latency_s,
        rounds=int(details.get("spec_verify_ct", 0)),
        histogram=tuple(details.get("spec_correct_drafts_histogram", ())),
    )
