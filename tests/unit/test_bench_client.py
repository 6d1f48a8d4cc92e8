"""The sweep's client against a stub of the OpenAI completions API, values checked by hand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sglang_dflow.bench.client import Request, drive
from sglang_dflow.server import reserve_port


class _Stub(BaseHTTPRequestHandler):
    """Answers prompt [n] with n pairs of tokens, 50 ms before each pair; [400] is refused, [500] loses a token."""

    in_flight, most, bodies = 0, 0, []  # type: ignore[var-annotated]
    lock = threading.Lock()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            _Stub.bodies.append(body)
            _Stub.in_flight += 1
            _Stub.most = max(_Stub.most, _Stub.in_flight)
        (number,) = body["prompt"]
        if number == 400:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b"no such thing")
        else:
            self._stream(2 if number == 500 else number, lost=number == 500)
        with self.lock:
            _Stub.in_flight -= 1

    def _stream(self, pairs: int, lost: bool) -> None:
        self.send_response(200)
        self.end_headers()
        for pair in range(pairs):
            time.sleep(0.05)
            self._send(choices=[{"text": "a b", "token_ids": [10 * pair, 10 * pair + 1]}])
        details = {"spec_verify_ct": pairs, "spec_correct_drafts_histogram": [0, pairs]}
        self._send(choices=[], sglext={"spec_tokens_details": details})
        self._send(choices=[], usage={"completion_tokens": 2 * pairs + lost})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, **chunk: Any) -> None:
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    _Stub.in_flight, _Stub.most, _Stub.bodies = 0, 0, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Stub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_ids_times_and_verify_counts(url: str) -> None:
    """Catches answers out of order, a TTFT that waits for the whole stream, and details lost with empty choices."""
    done: list[int] = []
    load = drive(url, [[3], [1]], concurrency=2, max_new_tokens=9, progress=done.append)
    three, one = load.requests
    assert three.output_ids == [0, 1, 10, 11, 20, 21] and one.output_ids == [0, 1]
    assert (three.rounds, three.histogram) == (3, (0, 3)) and (one.rounds, one.histogram) == (1, (0, 1))
    assert 0.05 <= three.ttft_s < 0.1 and 0.15 <= three.latency_s < 0.25
    assert three.latency_s <= load.seconds < 0.3
    assert sorted(done) == [1, 2]
    sent = _Stub.bodies[0]
    assert (sent["temperature"], sent["max_tokens"], sent["stream"]) == (0.0, 9, True)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_concurrency_is_kept(url: str, concurrency: int) -> None:
    drive(url, [[1]] * 6, concurrency=concurrency, max_new_tokens=2)
    assert _Stub.most == concurrency


def test_a_refusal_stops_the_load(url: str) -> None:
    with pytest.raises(RuntimeError, match="answered 400: no such thing"):
        drive(url, [[1], [400]], concurrency=1, max_new_tokens=2)


def test_a_lost_token_stops_the_load(url: str) -> None:
    with pytest.raises(RuntimeError, match="told 5 completion tokens but streamed 4"):
        drive(url, [[500]], concurrency=1, max_new_tokens=2)


def test_a_server_that_is_gone_stops_the_load() -> None:
    with reserve_port() as nobody, pytest.raises(RuntimeError, match="does not answer any more"):
        drive(f"http://127.0.0.1:{nobody.getsockname()[1]}", [[1]], concurrency=1, max_new_tokens=2)


def test_tpot_leaves_the_first_token_out() -> None:
    """(latency - TTFT) / (tokens - 1), the definition of SGLang's own client."""
    assert Request([1, 2, 3, 4, 5], ttft_s=0.2, latency_s=1.0).tpot_s == pytest.approx(0.2)
    assert Request([1], ttft_s=0.2, latency_s=0.2).tpot_s is None
