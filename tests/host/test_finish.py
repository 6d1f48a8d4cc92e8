"""A run of accepted tokens ends its request where the same tokens one by one would have ended it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sglang_dflow.hooks import finish


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish, "_serves_dflow", lambda: True)


@pytest.fixture(scope="module")
def tokenizer(target: Path) -> Any:
    return get_tokenizer(str(target))


def _request(tokenizer: Any, tokens: list[int], **sampling: Any) -> Any:
    params = SamplingParams(temperature=0.0, **{"max_new_tokens": 50} | sampling)
    params.normalize(tokenizer)
    request = Req("r", "", [1, 2, 3], params, eos_token_ids={tokenizer.eos_token_id}, vocab_size=len(tokenizer))
    request.tokenizer = tokenizer
    request.output_ids.extend(tokens)
    return request


def _ended(request: Any, *, by_token: bool, accepted: int) -> tuple[list[int], str, Any]:
    """Output, what ended it and what was matched; the run in one step or, as the target alone gives it, in several."""
    original = getattr(Req.update_finish_state, "__wrapped__", Req.update_finish_state)
    if by_token:
        run = request.output_ids[-accepted:]
        del request.output_ids[-accepted:]
        for token in run:
            request.output_ids.append(token)
            original(request, 1)
            if request.finished():
                break
    else:
        finish.end_at_first(original, request, accepted)
    reason = {"type": None} if request.finished_reason is None else request.finished_reason.to_json()
    return list(request.output_ids_through_stop), reason["type"], reason.get("matched")


@pytest.mark.parametrize(
    ("text", "accepted", "sampling", "length"),
    [
        (" is: 10.", 3, {"stop": [".", "1"]}, 4),  # the second of the list comes first
        (" is: 10.", 3, {"stop": ["1", "."]}, 4),
        (" is: 10.<|im_end|> not.", 6, {"stop": ["not"]}, 7),  # a stop string behind an end token
        (" is: 10.", 4, {"stop": ["."], "max_new_tokens": 4}, 4),  # behind the last token allowed
        (" is: 10.", 4, {"stop": ["x"]}, 6),  # nothing ends it
    ],
)
def test_run_ends_where_its_tokens_would(
    tokenizer: Any, text: str, accepted: int, sampling: dict[str, Any], length: int
) -> None:
    tokens = tokenizer.encode(text)
    one_by_one = _ended(_request(tokenizer, tokens, **sampling), by_token=True, accepted=accepted)
    at_once = _ended(_request(tokenizer, tokens, **sampling), by_token=False, accepted=accepted)
    assert at_once == one_by_one
    assert len(at_once[0]) == length


@pytest.mark.parametrize(("sampling", "length"), [({"max_new_tokens": 2}, 2), ({"stop": ["1"]}, 4), ({}, 6)])
def test_abort_keeps_nothing_behind_an_end(tokenizer: Any, sampling: dict[str, Any], length: int) -> None:
    """Catches an aborted answer that is longer than `max_new_tokens` (the soak found 4 tokens of 2)."""
    request = _request(tokenizer, tokenizer.encode(" is: 10."), **sampling)
    request.to_finish = FINISH_ABORT()
    output, kind, _ = _ended(request, by_token=False, accepted=5)
    assert (len(output), kind) == (length, "abort")


def test_grammar_is_asked_about_the_whole_run_only(tokenizer: Any) -> None:
    """It has taken in all tokens by then: asked about the first, it would end the answer there."""
    request = _request(tokenizer, tokenizer.encode(" is: 10."))
    request.grammar = SimpleNamespace(is_terminated=lambda: True)
    assert len(_ended(request, by_token=False, accepted=4)[0]) == 6
    assert request.finished() and request.grammar is not None
