"""verify.py: differences are found where they are, and a tie is told from a fault."""

from __future__ import annotations

import json

import pytest

from sglang_dflow import verify
from sglang_dflow.prompts import Prompt
from sglang_dflow.verify import Completion, ConcurrencyResult, explain_difference, first_difference, mean_tau


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


def _result(*, mismatches: int, ties: int, tokens: int = 10, verify_steps: int = 5) -> ConcurrencyResult:
    return ConcurrencyResult(4, mismatches, ties, tokens / verify_steps, tokens, verify_steps, 1.0)


@pytest.mark.parametrize(("mismatches", "ties", "status"), [(0, 0, 0), (0, 3, 0), (1, 0, 1), (2, 1, 1)])
def test_exit_status_tells_mismatches(mismatches: int, ties: int, status: int) -> None:
    """A mismatch fails the command; a tie alone does not."""
    assert verify._report({1: _result(mismatches=mismatches, ties=ties)}, dtype="float32") == status


def test_last_line_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    """tau over all levels weighs steps, not levels."""
    results = {
        1: _result(mismatches=0, ties=1, tokens=30, verify_steps=10),
        8: _result(mismatches=1, ties=0, tokens=30, verify_steps=30),
    }
    verify._report(results, dtype="float32")
    total = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (total["requests"], total["mismatches"], total["ties"], total["tau"]) == (8, 1, 1, 1.5)
    assert set(total["concurrency"]) == {"1", "8"}


@pytest.mark.parametrize(
    ("baseline", "tested", "words"),
    [
        ({"speculative_algorithm": "DFLASH", "dtype": "float32"}, {}, "the baseline server speculates"),
        ({"dtype": "auto"}, {}, "tells dtype 'auto', expected one of"),
        ({"dtype": "float32"}, {"speculative_algorithm": "DFLASH"}, "runs 'DFLASH', expected DFLOW"),
        ({"dtype": "float32"}, {"speculative_algorithm": None}, "runs None, expected DFLOW"),
        (
            {"dtype": "float32", "model_path": "a"},
            {"speculative_algorithm": "DFLOW", "dtype": "float32", "model_path": "b"},
            "differ in model_path",
        ),
    ],
)
def test_servers_that_prove_nothing_are_refused(baseline: dict, tested: dict, words: str) -> None:
    """Comparing a server with itself, or without speculation, would always pass."""
    with pytest.raises(RuntimeError, match=words):
        verify._require_baseline(baseline, needs_dtype=True)
        verify._require_dflow(tested, like=baseline)
