"""At temperature 1 the committed tokens follow the target's own distribution.

Many short answers are drawn from the real server. The first token of an answer comes from the prefill; the second
and third come out of verified blocks (accepted drafts and bonus tokens alike). Their conditional distribution,
computed by transformers on the same weights, is compared by one chi-square over all well-filled contexts. The same
comparison must reject the server while its verifier is broken on purpose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from scipy import stats

from sglang_dflow.server import Server, ServerSpec, post
from tests.support.arms import POOL_ARGS, Arm

# Each is continued by one likely token (the prefill's), so that many draws share the context of the verified ones,
# and those have a wide distribution in most.
CONTEXTS = (
    "The United States of",
    "Thank you very",
    "I would like to thank you from the bottom of my",
    "The capital city of the United",
    "import numpy as np\nimport matplotlib.pyplot as",
)
DRAWS_PER_CONTEXT = 704
DRAWS_PER_REQUEST = 64
MIN_DRAWS = 40  # of a conditional distribution that is worth testing
MIN_EXPECTED = 5.0  # per bin, the usual condition of the chi-square approximation


class Fit(NamedTuple):
    """Chi-square of all tested conditional distributions together."""

    statistic: float
    freedom: int
    draws: int

    @property
    def p_value(self) -> float:
        return float(stats.chi2.sf(self.statistic, self.freedom))


def _draw(url: str, ids: Sequence[int], draws: int) -> list[tuple[int, ...]]:
    """Return answers of three tokens to one context."""
    body = {
        "input_ids": list(ids),
        "sampling_params": {
            "temperature": 1.0,
            "max_new_tokens": 3,
            "ignore_eos": True,
            "n": DRAWS_PER_REQUEST,
        },
    }
    requests = range(draws // DRAWS_PER_REQUEST)
    # One request at a time: with the server's fixed seed the draws are the same in every run.
    answers = [post(url, "/generate", body) for _ in requests]
    return [tuple(answer["output_ids"]) for answered in answers for answer in answered]


@torch.no_grad()
def _fit(model: Any, context_ids: Sequence[int], answers: Sequence[tuple[int, ...]]) -> Fit:
    """Compare tokens 2 and 3 with the model's distribution given what came before."""
    statistic, freedom, draws = 0.0, 0, 0
    for depth in (1, 2):
        followers: dict[tuple[int, ...], Counter[int]] = {}
        for answer in answers:
            followers.setdefault(answer[:depth], Counter())[answer[depth]] += 1
        for prefix, counts in followers.items():
            total = counts.total()
            if total < MIN_DRAWS:
                continue
            logits = model(torch.tensor([[*context_ids, *prefix]])).logits[0, -1].double()
            expected = torch.softmax(logits, dim=-1) * total
            bins = (expected >= MIN_EXPECTED).nonzero().flatten().tolist()
            observed = [float(counts[token]) for token in bins]
            wanted = [float(expected[token]) for token in bins]
            # Everything rare is one bin, joined to the smallest one if it is too rare by itself.
            rest_wanted, rest_observed = total - sum(wanted), total - sum(observed)
            if rest_wanted >= MIN_EXPECTED or not wanted:
                wanted.append(rest_wanted)
                observed.append(rest_observed)
            else:
                smallest = wanted.index(min(wanted))
                wanted[smallest] += rest_wanted
                observed[smallest] += rest_observed
            statistic += sum((o - w) ** 2 / w for o, w in zip(observed, wanted))
            freedom += len(wanted) - 1
            draws += total
    return Fit(statistic, freedom, draws)


def _fit_all(server: Server, tokenizer: Any, model: Any, *, draws: int) -> Fit:
    fits = []
    for context in CONTEXTS:
        ids = tokenizer.encode(context)
        fits.append(_fit(model, ids, _draw(server.url, ids, draws)))
    return Fit(*(sum(column) for column in zip(*fits)))


@pytest.fixture(scope="module")
def model(target: Path) -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    yield AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


class Sampled(NamedTuple):
    """A running server, and the file that breaks its verifier while it exists."""

    server: Server
    broken: Path


@pytest.fixture(scope="module")
def sampled(target: Path, drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampled]:
    broken = tmp_path_factory.mktemp("sampling") / "broken"
    spec = ServerSpec(
        model=str(target),
        drafter=str(drafter),
        dtype="float32",
        extra_args=(*POOL_ARGS, "--random-seed", "1"),
        env=Arm(probe={"greedy_verify": str(broken)}).probe_env(),
    )
    with Server(spec) as server:
        yield Sampled(server, broken)


def test_sampled_tokens_fit_the_target(sampled: Sampled, tokenizer: Any, model: Any) -> None:
    """Catches a verifier that is greedy, keeps the rejected draft in the bonus, or ignores the temperature."""
    fit = _fit_all(sampled.server, tokenizer, model, draws=DRAWS_PER_CONTEXT)
    print(fit, fit.p_value)
    assert fit.draws >= 4000 and fit.freedom >= 20
    assert fit.p_value > 0.001


def test_a_broken_verifier_is_noticed(sampled: Sampled, tokenizer: Any, model: Any) -> None:
    """The same draws while sampled requests are verified greedily: the fit must fail."""
    sampled.broken.touch()
    try:
        fit = _fit_all(sampled.server, tokenizer, model, draws=2 * DRAWS_PER_REQUEST)
    finally:
        sampled.broken.unlink()
    print(fit, fit.p_value)
    assert fit.p_value < 1e-6
