"""A decode server of prefill-decode disaggregation, without the transfer: the host's own stand-in hands requests over.

With `--disaggregation-transfer-backend fake` everything on the decode server is real (queues, slots for requests in
transfer, the batch that replaces the prefill, rounds) but the prompt's KV, which holds whatever the cache held: what
the server answers means nothing here, which rows its drafts relay does. A real transfer needs two servers and RDMA or
a transfer library; it was not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_dflow.server import Server, ServerSpec, post
from tests.support.arms import POOL_ARGS, Arm
from tests.support.lives import Life, Lives, read_lives, wait_until_idle
from tests.support.tiny_pair import make_tiny_pair

BLOCK = 4
FAKE_BOOTSTRAP_HOST = "2.2.2.2"
"""The host's own constant (sglang.srt.disaggregation.utils): a request from there is handed over without a transfer."""
SLOTS = 3
"""Two running requests and one in transfer."""
ARGS = (
    *("--skip-tokenizer-init", "--max-running-requests", "2", "--disaggregation-decode-extra-slots", "1"),
    *("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake"),
    *("--disaggregation-decode-retraction-backup", "none"),  # the default pool of the host is pinned by CUDA
)


class DecodeServer(NamedTuple):
    """The running server; `directory` holds the probe's trace and switches."""

    server: Server
    directory: Path

    def ask(self, rid: str, prompt_len: int, max_new_tokens: int) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        body = {"rid": rid, "input_ids": [2 + i % 90 for i in range(prompt_len)], "sampling_params": sampling}
        return post(self.server.url, "/generate", {**body, "bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_room": 0})

    def lives(self) -> Lives:
        return read_lives(self.directory / "lives", block_size=BLOCK)


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DecodeServer]:
    folder = tmp_path_factory.mktemp("decode")
    pair = make_tiny_pair(folder)
    probe = {"lives": str(folder / "lives"), "switches": str(folder), "pure": True}
    spec = ServerSpec(
        model=str(pair.target),
        drafter=str(pair.drafter),
        dtype="float32",
        extra_args=(*POOL_ARGS, *ARGS),
        env=Arm(probe=probe).probe_env(),
    )
    with Server(spec, log_path=folder / "server.log") as server:
        yield DecodeServer(server, folder)


def test_first_round_after_a_hand_over_is_plain(decode: DecodeServer) -> None:
    """Requests join running ones and follow each other in three slots; every draft relays what its own life allows."""
    with ThreadPoolExecutor(max_workers=SLOTS) as clients:
        answers = list(clients.map(lambda i: decode.ask(f"handed-{i}", 5 + i % 4, 12 + i), range(12)))
    seen = decode.lives()
    assert seen.wrong == []
    assert seen.seen[Life.FIRST_ROUND] >= 12 and seen.seen[Life.SLOT_REUSE] >= 12 - SLOTS
    assert seen.seen[Life.JOIN] > 0
    assert all(answer["meta_info"]["relayed_rows"] > 0 for answer in answers)


@pytest.mark.parametrize("forget", [True, False])
def test_planted_state_reaches_no_request_that_is_handed_over(decode: DecodeServer, forget: bool) -> None:
    """The next request of the slot drafts at the very position where the old one's states wait for a draft.

    With the forgetting taken away (a switch of the probe) the same steps must leak: else they would prove nothing.
    """
    name = f"planted-{forget}"
    decode.ask(name, 7, 12)
    wait_until_idle(decode.server.url)
    before = decode.lives()
    prefix_len, accept_len, _ = before.rounds[name][-1]
    position = prefix_len + accept_len + 1
    assert accept_len < BLOCK - 1, "the last block was accepted in full: nothing is planted, take another length"
    keep = decode.directory / "keep"
    if not forget:
        keep.touch()
    try:
        for i in range(SLOTS):  # free slots are taken in turn
            decode.ask(f"{name}-next-{i}", position, 4)
    finally:
        keep.unlink(missing_ok=True)
    after = decode.lives()
    (next_one,) = (
        rid for rid, slot in after.slots.items() if rid.startswith(f"{name}-next") and slot == before.slots[name]
    )
    first = after.rounds[next_one][0]
    assert first[0] == position
    assert first[2] == (0 if forget else BLOCK - 1 - accept_len)
