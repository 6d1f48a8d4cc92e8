"""The served product as a user meets it: OpenAI API, streaming, /server_info, the relay's switch, logs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM

from sglang_dflow.server import Server, ServerSpec, has_cuda, post, relay_state, set_relay
from sglang_dflow.training.evaluate import main as acceptance
from sglang_dflow.verify import generate_all, token_logprobs
from tests.support.arms import POOL_ARGS

QUESTION = [{"role": "user", "content": "Name the four seasons of the year."}]


@pytest.fixture(scope="module")
def server(target: Path, drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    spec = ServerSpec(model=str(target), drafter=str(drafter), dtype="float32", extra_args=POOL_ARGS)
    with Server(spec, log_path=tmp_path_factory.mktemp("server") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none")


def test_start_line_names_the_relay(server: Server) -> None:
    """The line that README tells the user to look for."""
    assert "DFLOW relay on. drafter=DFlowDraftModel block_size=8 relay_source=" in server.log_text()


def test_chat_completion_and_stream_agree(client: OpenAI) -> None:
    """Streaming must not lose, repeat or reorder tokens of accepted runs."""
    arguments: dict[str, Any] = {"model": "default", "messages": QUESTION, "temperature": 0.0, "max_tokens": 40}
    whole = client.chat.completions.create(**arguments)
    pieces = [
        event.choices[0].delta.content or ""
        for event in client.chat.completions.create(**arguments, stream=True)
        if event.choices
    ]
    assert len(pieces) > 3
    assert "".join(pieces) == whole.choices[0].message.content
    assert whole.usage is not None and whole.usage.completion_tokens > 1


def test_server_info_shows_the_relay(server: Server, prompts_ids: list[list[int]]) -> None:
    before = relay_state(server.url)
    generate_all(server.url, prompts_ids[:2], concurrency=1, max_new_tokens=24)
    after = relay_state(server.url)
    assert after["relay"] == "on"
    assert after["pool_bytes"] > 0
    assert after["eligible_rows"] > before["eligible_rows"]
    assert before["relayed_rows"] < after["relayed_rows"] <= after["eligible_rows"]
    assert after["relay_hit_rate"] == pytest.approx(after["relayed_rows"] / after["eligible_rows"])


def test_relay_switch_changes_drafts_not_output(server: Server, prompts_ids: list[list[int]]) -> None:
    """Off at run time relays no row; on again relays; the text never changes."""
    answers = {}
    for relay in (True, False):
        set_relay(server.url, relay)
        before = relay_state(server.url)
        assert before["relay"] == ("on" if relay else "off")
        answers[relay] = generate_all(server.url, prompts_ids[:6], concurrency=2, max_new_tokens=48)
        relayed = relay_state(server.url)["relayed_rows"] - before["relayed_rows"]
        assert (relayed > 0) is relay
    set_relay(server.url, True)
    assert [a.output_ids for a in answers[True]] == [a.output_ids for a in answers[False]]
    assert [a.verify_steps for a in answers[True]] != [a.verify_steps for a in answers[False]]


def test_switch_refuses_nonsense(server: Server) -> None:
    assert post(server.url, "/set_internal_state", {"server_args": {"dflow_relay": 7}}) == [False]
    assert relay_state(server.url)["relay"] == "on"


@pytest.mark.parametrize(
    "parameter",
    [{"frequency_penalty": 0.5}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.2}, {"min_new_tokens": 5}],
    ids=lambda parameter: next(iter(parameter)),
)
def test_inexact_requests_are_refused(server: Server, parameter: dict[str, float]) -> None:
    """The host would verify the block without these and answer something else, silently."""
    body = {"text": "Once", "sampling_params": {"temperature": 0.0, "max_new_tokens": 8, **parameter}}
    with pytest.raises(RuntimeError, match="400.*DFLOW cannot honour") as refusal:
        post(server.url, "/generate", body)
    assert next(iter(parameter)) in str(refusal.value)
    if has_cuda():
        return  # min_p is refused there, by the same check (tests/unit/test_request_checks.py)
    body["sampling_params"] = {"temperature": 0.7, "min_p": 0.1, "top_p": 0.9, "max_new_tokens": 8}
    assert post(server.url, "/generate", body)["meta_info"]["completion_tokens"] == 8


def test_token_logprobs_are_the_targets(server: Server, target: Path, prompts_ids: list[list[int]]) -> None:
    """What `verify` tells a tie by: compared with transformers on the same weights."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    prefix = min(prompts_ids, key=len) + [28, 30, 260]
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([prefix])).logits[0, -1], dim=-1)
    tokens = [int(token) for token in expected.topk(3).indices]
    found = token_logprobs(server.url, prefix, tokens)
    assert found == pytest.approx([float(expected[token]) for token in tokens], abs=1e-3)


def test_acceptance_of_the_server_is_that_of_the_replay(
    server: Server, target: Path, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`sglang-dflow acceptance`: the host's counters, and about as many rounds as the replay in process needs.

    Not exactly as many: the replay keeps captured states in bf16.
    """
    prompts = tmp_path / "two.jsonl"
    texts = ["Name the four seasons of the year.", "Write a Python function that returns the larger of two numbers."]
    prompts.write_text("".join(json.dumps({"id": f"two/{i}", "turns": [text]}) + "\n" for i, text in enumerate(texts)))
    common = ["--prompts", str(prompts), "--max-new-tokens", "40", "--cache", str(tmp_path)]
    in_process = ["--target", str(target), "--drafter", str(drafter), "--dtype", "float32", "--device", "cpu"]
    records = []
    for arguments in (["--server", server.url, "--concurrency", "2"], in_process):
        assert acceptance([*common, *arguments]) == 0
        records.append(json.loads(capsys.readouterr().out.splitlines()[-1])["sets"]["two"])
    served, replayed = records
    for arm in ("relay_off", "relay_on"):
        # The server counts the token of the prefill, the replay does not.
        assert served[arm]["tokens"] == replayed[arm]["tokens"] + 2
        assert served[arm]["rounds"] == pytest.approx(replayed[arm]["rounds"], abs=3)
        assert served[arm]["hit_rate"] == pytest.approx(replayed[arm]["hit_rate"], abs=0.05)
        assert served[arm]["by_depth"] == pytest.approx(replayed[arm]["by_depth"], abs=0.07)
    assert served["relay_on"]["hit_rate"] > 0.5 and served["relay_off"]["hit_rate"] == 0
    assert relay_state(server.url)["relay"] == "on"


def test_stop_leaves_no_process(server: Server) -> None:
    """`Server` stops by process group: a scheduler left behind would burn a core for ever. Last: it ends the server."""

    group = server.pid
    server.stop()
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)
