"""verify.py: differences are found where they are, and a tie is told from a fault."""

from __future__ import annotations

import pytest

from sglang_dflow import verify
from sglang_dflow.prompts import Prompt
from sglang_dflow.verify import Completion, explain_difference, first_difference, mean_tau


@pytest.mark.parametrize(
    ("expected", "found", "position"),
    [
        ((1, 2, 3), (1, 2, 3), None),
        ((1, 2, 3), (1, 9, 3), 1),
        ((1, 2), (1, 2, 3), 2),
        ((1, 2, 3), (), 0),
        ((), (), None),
    ],
)
def test_first_difference(expected: tuple[int, ...], found: tuple[int, ...], position: int | None) -> None:
    assert first_difference(expected, found) == position


@pytest.mark.parametrize(
    ("logprobs", "tie"),
    [([-0.70, -0.70005], True), ([-0.7, -1.2], False), ([-1.2, -0.7], False)],
)
def test_a_tie_is_told_from_a_fault(monkeypatch: pytest.MonkeyPatch, logprobs: list[float], tie: bool) -> None:
    """The target is asked for both tokens after the common prefix, and only closeness makes a tie."""
    asked = []

    def token_logprobs(url: str, prefix: list[int], tokens: list[int]) -> list[float]:
        asked.append((prefix, tokens))
        return logprobs

    monkeypatch.setattr(verify, "token_logprobs", token_logprobs)
    difference = explain_difference(
        "url", Prompt("p", "x"), [7, 8], Completion((1, 2, 3), 0), Completion((1, 5, 3), 2), tie_nats=1e-3
    )
    assert asked == [([7, 8, 1], [2, 5])]
    assert (difference.position, difference.expected, difference.found) == (1, 2, 5)
    assert difference.tie is tie


def test_a_shorter_answer_is_never_a_tie() -> None:
    difference = explain_difference(
        "url", Prompt("p", "x"), [7], Completion((1, 2), 0), Completion((1,), 1), tie_nats=9.0
    )
    assert (difference.expected, difference.found, difference.tie) == (2, -1, False)


def test_tau_counts_tokens_per_verify_step() -> None:
    answers = [Completion((1,) * 9, 3), Completion((1,) * 3, 3), Completion((5,), 0)]
    assert mean_tau(answers) == 2.0
    assert mean_tau([Completion((1, 2), 0)]) == 0.0
