"""What the host offers with a request, with the relay on: the answers of a server without speculation, token by token.

The DFLOW server differs from it in everything that must not matter: pages of 64 tokens, chunks of 128, overlap
scheduling off. Pages of 16, overlap on, mixed chunks, radix hits and sessions are in `test_lives.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from safetensors.torch import load_file

from sglang_dflow.server import Server, ServerSpec, post, relay_state
from tests.support.arms import POOL_ARGS

GREEDY = {"temperature": 0.0, "max_new_tokens": 24}
TEXT = (
    "<|im_start|>user\nName the four seasons of the year and one thing people do in each of them.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "people": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
# What the answer without these would begin with is made impossible, and something else likely.
BIAS = {"504": -100.0, "28": 4.0, "30": 4.0}
# Input embeddings want no radix cache; a small model may write white space for ever where a grammar allows it.
COMMON_ARGS = (
    *POOL_ARGS,
    *("--disable-radix-cache", "--constrained-json-disable-any-whitespace", "--tool-call-parser", "llama3"),
)


def _body(sampling: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"text": TEXT, "sampling_params": GREEDY | sampling, **more}


QUESTIONS: dict[str, dict[str, Any]] = {
    "plain": _body({}),
    "n": _body({"n": 3}),
    "logprobs": _body({}, return_logprob=True, top_logprobs_num=3, logprob_start_len=0),
    "logit bias": _body({"logit_bias": BIAS}),
    "JSON schema": _body({"json_schema": json.dumps(SCHEMA), "max_new_tokens": 60}),
    "regex": _body(
        {"max_new_tokens": 60, "regex": "(spring|summer|autumn|winter)( and (spring|summer|autumn|winter)){3}"}
    ),
    "stop string": _body({"stop": [" and", "."], "max_new_tokens": 60}),
    # One accepted run holds both, in the other order: "10." (the soak of 3,000 requests found it).
    "two stop strings": {
        "input_ids": [325, 2848, 670, 451, 2677],
        "sampling_params": GREEDY | {"stop": [".", "1"], "max_new_tokens": 17},
    },
    "no special tokens": _body({"skip_special_tokens": False, "ignore_eos": True, "max_new_tokens": 60}),
}


def _embeddings(target: Path) -> dict[str, Any]:
    """A prompt given as embeddings: of token ids, so that the answer makes sense."""
    table = next(v for k, v in load_file(next(target.glob("*.safetensors"))).items() if "embed_tokens" in k)
    ids = torch.tensor([504, 3575, 2240, 282, 4649, 314, 1217])  # The capital city of France is called
    return {"input_embeds": table[ids].float().tolist(), "sampling_params": GREEDY}


def _ask(server: Server, target: Path) -> dict[str, Any]:
    answers = {name: post(server.url, "/generate", body) for name, body in QUESTIONS.items()}
    answers["input embeddings"] = post(server.url, "/generate", _embeddings(target))
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    answers["tool call"] = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],  # type: ignore[list-item]
        tool_choice="required",
        temperature=0.0,
        max_tokens=60,
    )
    return answers


@pytest.fixture(scope="module")
def expected(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    spec = ServerSpec(model=str(target), dtype="float32", extra_args=COMMON_ARGS)
    with Server(spec, log_path=tmp_path_factory.mktemp("features") / "reference.log") as server:
        return _ask(server, target)


@pytest.fixture(scope="module")
def server(
    target: Path, drafter: Path, expected: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    args = ("--page-size", "64", "--chunked-prefill-size", "128", "--disable-overlap-schedule")
    spec = ServerSpec(
        model=str(target),
        drafter=str(drafter),
        dtype="float32",
        extra_args=(*COMMON_ARGS, *args),
    )
    with Server(spec, log_path=tmp_path_factory.mktemp("features") / "dflow.log") as running:
        yield running


@pytest.fixture(scope="module")
def found(server: Server, target: Path) -> dict[str, Any]:
    return _ask(server, target)


def _parts(answer: Any) -> list[dict[str, Any]]:
    return answer if isinstance(answer, list) else [answer]


@pytest.mark.parametrize("name", [*QUESTIONS, "input embeddings"])
def test_answers_equal_no_speculation(name: str, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Each host feature that touches the target's logits, the answer's end, or what is returned with it."""
    for ours, theirs in zip(_parts(found[name]), _parts(expected[name]), strict=True):
        assert ours["output_ids"] == theirs["output_ids"]
        assert ours.get("text") == theirs.get("text")
        assert ours["meta_info"]["finish_reason"] == theirs["meta_info"]["finish_reason"]
        assert ours["meta_info"]["spec_verify_ct"] > 0


def test_questions_ask_for_something(found: dict[str, Any]) -> None:
    """A bias or a grammar that changed nothing would be compared with nothing."""
    plain = found["plain"]["output_ids"]
    assert found["logit bias"]["output_ids"] != plain
    assert len({tuple(part["output_ids"]) for part in found["n"]}) == 1 and len(found["n"]) == 3
    schema = json.loads(found["JSON schema"]["text"])
    assert set(schema) == {"city", "people"} and isinstance(schema["people"], int)
    assert re.fullmatch(QUESTIONS["regex"]["sampling_params"]["regex"], found["regex"]["text"])


def test_logprobs_equal_no_speculation(expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Input, output and top log-probabilities: of every committed token, from the row that predicted it."""
    ours, theirs = found["logprobs"]["meta_info"], expected["logprobs"]["meta_info"]
    for name in ("input_token_logprobs", "output_token_logprobs"):
        assert [entry[1] for entry in ours[name]] == [entry[1] for entry in theirs[name]], name
        values = [[entry[0] for entry in one[name] if entry[0] is not None] for one in (ours, theirs)]
        assert values[0] == pytest.approx(values[1], abs=1e-3), name
    assert len(ours["output_token_logprobs"]) == GREEDY["max_new_tokens"]
    for name in ("input_top_logprobs", "output_top_logprobs"):
        for row, reference in zip(ours[name], theirs[name], strict=True):
            if reference is not None:
                assert [entry[0] for entry in row] == pytest.approx([entry[0] for entry in reference], abs=1e-3), name


def test_tool_call_that_is_required(expected: dict[str, Any], found: dict[str, Any]) -> None:
    ours, theirs = (answers["tool call"].choices[0].message for answers in (found, expected))
    assert ours.tool_calls and ours.tool_calls[0].function.name == "get_weather"
    assert [call.function for call in ours.tool_calls] == [call.function for call in theirs.tool_calls]


def test_the_relay_was_on(server: Server, found: dict[str, Any]) -> None:
    state = relay_state(server.url)
    assert state["relay"] == "on" and state["relayed_rows"] > 0
    info = server.server_info()
    assert info["page_size"] == 64 and info["disable_overlap_schedule"]
