"""serving/request_checks.py: what the host would verify inexactly is named; everything else passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflow.serving.request_checks import request_problem


def _params(**changes: Any) -> SimpleNamespace:
    neutral = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "min_p": 0.0,
        "temperature": 0.7,
    }
    return SimpleNamespace(**(neutral | changes))


def test_a_plain_request_passes() -> None:
    assert request_problem(_params(), verifies_min_p=False) is None


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens"])
def test_each_parameter_is_refused_by_name(name: str) -> None:
    problem = request_problem(_params(**{name: 2}), verifies_min_p=True)
    assert problem is not None and f"{name}=2" in problem and "Leave it out" in problem


def test_min_p_depends_on_the_platform() -> None:
    """The CPU platform's verification applies it, the host's CUDA verification does not."""
    assert request_problem(_params(min_p=0.1), verifies_min_p=True) is None
    assert "min_p=0.1" in str(request_problem(_params(min_p=0.1), verifies_min_p=False))


def test_all_are_named_at_once() -> None:
    problem = request_problem(_params(frequency_penalty=1.0, min_new_tokens=3), verifies_min_p=True)
    assert problem is not None and "frequency_penalty=1.0, min_new_tokens=3" in problem
