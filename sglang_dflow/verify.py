"""`sglang-dflow verify`: proof that DFLOW commits exactly what the target alone would.

Sends the same greedy requests to a server without speculation and to one with DFLOW, at several concurrencies, and
compares token ids. A difference is followed up: the target's own log-probabilities of the two tokens at the first
differing position tell a numerical tie (both tokens equally likely within the arithmetic's resolution, so batch
shapes decide) from a fault. Last line of output: one JSON object. Exit status 1 if anything but ties differs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_dflow.arguments import positive_int
from sglang_dflow.prompts import Prompt, read_prompts, varied_prompts
from sglang_dflow.server import Server, ServerSpec, post, server_info

TIE_NATS = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.03}
"""Largest log-probability gap that the dtype's rounding of logits of magnitude 16 to 32 can hide or invert (float32:
accumulation order over a hidden row, generously)."""


@dataclass(frozen=True)
class Completion:
    """One greedy answer. `verify_steps` is 0 without speculation."""

    output_ids: tuple[int, ...]
    verify_steps: int

    @property
    def tokens(self) -> int:
        return len(self.output_ids)


@dataclass(frozen=True)
class Difference:
    """Where two answers to one prompt part.

    Attributes:
        prompt_id: which prompt.
        position: index of the first differing output token.
        expected, found: token id without speculation and with it; -1 where an answer had ended.
        expected_logprob, found_logprob: the target's own, in nats; None where an answer had ended.
        tie: True if the two are closer than the dtype can tell apart.
    """

    prompt_id: str
    position: int
    expected: int
    found: int
    expected_logprob: float | None
    found_logprob: float | None
    tie: bool


@dataclass(frozen=True)
class ConcurrencyResult:
    """Outcome at one concurrency. `tau`: committed tokens per verify step, bonus included."""

    requests: int
    mismatches: int
    ties: int
    tau: float
    tokens: int
    verify_steps: int
    seconds: float


def generate(url: str, input_ids: Sequence[int], max_new_tokens: int) -> Completion:
    """Return the greedy answer of a server to token ids."""
    body = {
        "input_ids": list(input_ids),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": max_new_tokens},
    }
    answer = post(url, "/generate", body)
    return Completion(
        output_ids=tuple(answer["output_ids"]),
        verify_steps=int(answer["meta_info"].get("spec_verify_ct", 0)),
    )


def generate_all(
    url: str,
    prompts_ids: Sequence[Sequence[int]],
    *,
    concurrency: int,
    max_new_tokens: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Completion]:
    """Answer all prompts in their order, `concurrency` at a time."""
    answers: list[Completion] = []
    with ThreadPoolExecutor(max_workers=concurrency) as workers:
        for answer in workers.map(lambda ids: generate(url, ids, max_new_tokens), prompts_ids):
            answers.append(answer)
            progress(len(answers))
    return answers


def mean_tau(answers: Sequence[Completion]) -> float:
    """Return committed tokens per verify step over all answers; 0.0 if none was speculated."""
    steps = sum(answer.verify_steps for answer in answers)
    return sum(answer.tokens for answer in answers if answer.verify_steps) / steps if steps else 0.0


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Return the index of the first differing token, None if the sequences are equal."""
    if tuple(expected) == tuple(found):
        return None
    for index, (a, b) in enumerate(zip(expected, found)):
        if a != b:
            return index
    return min(len(expected), len(found))


def explain_difference(
    url: str,
    prompt: Prompt,
    prompt_ids: Sequence[int],
    expected: Completion,
    found: Completion,
    *,
    tie_nats: float,
) -> Difference:
    """Ask the target for the log-probabilities of the two tokens where the answers part."""
    position = first_difference(expected.output_ids, found.output_ids)
    assert position is not None
    tokens = [answer.output_ids[position] if position < answer.tokens else -1 for answer in (expected, found)]
    logprobs: list[float | None] = [None, None]
    if -1 not in tokens:
        prefix = [*prompt_ids, *expected.output_ids[:position]]
        logprobs = list(token_logprobs(url, prefix, tokens))
    tie = None not in logprobs and abs(logprobs[0] - logprobs[1]) <= tie_nats  # type: ignore[operator]
    return Difference(prompt.id, position, tokens[0], tokens[1], logprobs[0], logprobs[1], tie)


def token_logprobs(url: str, prefix: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Return the target's log-probabilities (nats) of `tokens` as the next token after `prefix`."""
    body = {
        "input_ids": list(prefix),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": list(tokens),
    }
    entries = post(url, "/generate", body)["meta_info"]["output_token_ids_logprobs"][0]
    by_token = {int(token): float(logprob) for logprob, token, *_ in entries}
    return [by_token[token] for token in tokens]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-dflow verify",
        description="Compare greedy outputs of a server with DFLOW and one without speculation, token by token.",
    )
    parser.add_argument("--model", help="target: a directory or hub id (servers are started here)")
    parser.add_argument("--drafter", help="DFlow drafter: a directory or hub id")
    parser.add_argument("--url", help="a running server with DFLOW, instead of --model and --drafter")
    parser.add_argument("--baseline-url", help="a running server without speculation")
    parser.add_argument("--prompts", type=Path, help="prompt file (default: 64 built-in prompts)")
    parser.add_argument("--limit", type=positive_int, help="use only the first N prompts")
    parser.add_argument("--concurrency", default="1,8,32", help="comma-separated (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32", help="of the servers started here (default: %(default)s)")
    parser.add_argument("--no-overlap", action="store_true", help="start both servers without overlap scheduling")
    parser.add_argument("--server-args", default="", help="further sglang.launch_server arguments, one string")
    parser.add_argument("--tie-nats", type=float, help=f"largest gap called a tie (default by dtype: {TIE_NATS})")
    return parser


def _check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    started = args.model is not None and args.drafter is not None
    running = args.url is not None and args.baseline_url is not None
    if started == running:
        parser.error("give either --model and --drafter, or --url and --baseline-url")


@contextmanager
def _arm(url: str | None, spec: ServerSpec | None) -> Iterator[str]:
    """A running server's url, or one started for the time of the context."""
    if url is not None:
        yield url
        return
    assert spec is not None
    with Server(spec) as server:
        yield server.url


def _specs(args: argparse.Namespace) -> tuple[ServerSpec | None, ServerSpec | None]:
    if args.model is None:
        return None, None
    extra = [*shlex.split(args.server_args), *(["--disable-overlap-schedule"] if args.no_overlap else [])]
    common = {"model": args.model, "dtype": args.dtype, "extra_args": extra}
    return ServerSpec(**common), ServerSpec(**common, drafter=args.drafter)


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def _require_baseline(info: dict[str, Any], *, needs_dtype: bool) -> None:
    """Raise RuntimeError if this server cannot be the reference."""
    algorithm = info.get("speculative_algorithm")
    if algorithm is not None:
        raise RuntimeError(f"the baseline server speculates ({algorithm}); expected one without speculation")
    if needs_dtype and info.get("dtype") not in TIE_NATS:
        raise RuntimeError(
            f"the baseline server tells dtype {info.get('dtype')!r}, expected one of {sorted(TIE_NATS)}. Start it with "
            "--dtype, or say with --tie-nats how close two tokens must be to count as a tie"
        )


def _require_dflow(info: dict[str, Any], *, like: dict[str, Any]) -> None:
    """Raise RuntimeError if this server does not run DFLOW on the baseline's target."""
    if info.get("speculative_algorithm") != "DFLOW":
        raise RuntimeError(f"the server under test runs {info.get('speculative_algorithm')!r}, expected DFLOW")
    for name in ("model_path", "dtype"):
        if info.get(name) != like.get(name):
            raise RuntimeError(
                f"the servers differ in {name}: {like.get(name)!r} without speculation, {info.get(name)!r} with DFLOW. "
                "Compare servers of one target and dtype"
            )


def progress_lines(label: str, total: int) -> Callable[[int], None]:
    """Return what prints how many of `total` are done: every five seconds, and at the end."""
    last = time.monotonic()

    def told(done: int) -> None:
        nonlocal last
        if time.monotonic() - last > 5.0 or done == total:
            last = time.monotonic()
            print(f"  {label}: {done}/{total}", flush=True)

    return told


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; see the module docstring."""
    parser = _parser()
    args = parser.parse_args(argv)
    _check_arguments(parser, args)
    prompts = (varied_prompts() if args.prompts is None else read_prompts(args.prompts))[: args.limit]
    levels = list(dict.fromkeys(int(level) for level in args.concurrency.split(",")))
    base_spec, dflow_spec = _specs(args)

    outputs: dict[str, dict[int, list[Completion]]] = {"baseline": {}, "DFLOW": {}}
    times: dict[int, float] = {}
    prompts_ids: list[list[int]] = []
    with _arm(args.baseline_url, base_spec) as url:
        info = server_info(url)
        _require_baseline(info, needs_dtype=args.tie_nats is None)
        tokenizer = _tokenizer(info["tokenizer_path"])
        prompts_ids = [prompt.token_ids(tokenizer) for prompt in prompts]
        for level in levels:
            outputs["baseline"][level] = generate_all(
                url,
                prompts_ids,
                concurrency=level,
                max_new_tokens=args.max_new_tokens,
                progress=progress_lines(f"no speculation, concurrency {level}", len(prompts)),
            )
    tie_nats = args.tie_nats if args.tie_nats is not None else TIE_NATS[info["dtype"]]
    results: dict[int, ConcurrencyResult] = {}
    with _arm(args.url, dflow_spec) as url:
        _require_dflow(server_info(url), like=info)
        for level in levels:
            began = time.monotonic()
            answers = generate_all(
                url,
                prompts_ids,
                concurrency=level,
                max_new_tokens=args.max_new_tokens,
                progress=progress_lines(f"DFLOW, concurrency {level}", len(prompts)),
            )
            times[level] = time.monotonic() - began
            outputs["DFLOW"][level] = answers
            differences = [
                explain_difference(url, prompt, ids, expected, found, tie_nats=tie_nats)
                for prompt, ids, expected, found in zip(prompts, prompts_ids, outputs["baseline"][level], answers)
                if expected.output_ids != found.output_ids
            ]
            for difference in differences:
                print(describe_difference(difference, f"concurrency {level}"), flush=True)
            ties = sum(difference.tie for difference in differences)
            if not any(answer.verify_steps for answer in answers):
                raise RuntimeError("the server under test verified no block: nothing was compared")
            results[level] = ConcurrencyResult(
                requests=len(prompts),
                mismatches=len(differences) - ties,
                ties=ties,
                tau=round(mean_tau(answers), 4),
                tokens=sum(answer.tokens for answer in answers if answer.verify_steps),
                verify_steps=sum(answer.verify_steps for answer in answers),
                seconds=round(times[level], 2),
            )
    return _report(results, dtype=str(info["dtype"]))


def describe_difference(difference: Difference, where: str) -> str:
    """One line about a difference, for people."""
    kind = "tie" if difference.tie else "MISMATCH"
    return (
        f"{kind} at {where}: prompt {difference.prompt_id}, output token {difference.position}: "
        f"expected {difference.expected} (logprob {difference.expected_logprob}), "
        f"found {difference.found} (logprob {difference.found_logprob})"
    )


def _report(results: dict[int, ConcurrencyResult], *, dtype: str) -> int:
    print(f"{'concurrency':>11} {'requests':>8} {'mismatches':>10} {'ties':>5} {'tau':>6} {'tokens':>7} {'s':>7}")
    for level, r in results.items():
        print(
            f"{level:>11} {r.requests:>8} {r.mismatches:>10} {r.ties:>5} {r.tau:>6.3f} {r.tokens:>7} {r.seconds:>7.1f}"
        )
    mismatches = sum(result.mismatches for result in results.values())
    total = {
        "requests": sum(result.requests for result in results.values()),
        "mismatches": mismatches,
        "ties": sum(result.ties for result in results.values()),
        "tau": round(sum(r.tokens for r in results.values()) / sum(r.verify_steps for r in results.values()), 4),
        "dtype": dtype,
        "concurrency": {str(level): asdict(result) for level, result in results.items()},
    }
    print(json.dumps(total), flush=True)
    return 1 if mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
