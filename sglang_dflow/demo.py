"""`sglang-dflow demo`: the main job on the demo pair, in one screen.

A real SGLang server with `--speculative-algorithm DFLOW`, the real SmolLM2-135M-Instruct as target, the drafter
shipped in this package; a chat completion streamed through the OpenAI client; then the same held-out prompts with
the relay on and off on the same server, outputs compared token by token. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflow.prompts import Prompt, demo_prompts, read_prompts
from sglang_dflow.provenance import versions
from sglang_dflow.server import Server, ServerSpec, relay_state, set_relay
from sglang_dflow.verify import Completion, generate_all, mean_tau

DEMO_DRAFTER = Path(__file__).parent / "assets" / "smollm2-135m-dflow-b8"
CHAT_PROMPT = "Write a Python function that returns the second largest number of a list, and explain it."


class RelayArm(NamedTuple):
    """Answers with the relay on or off, and the share of mask rows that were relayed."""

    answers: list[Completion]
    hit_rate: float


def stream_chat(url: str, text: str, max_tokens: int) -> int:
    """Print a streamed chat completion as it arrives; return the number of streamed pieces."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": text}],
        temperature=0.0,
        max_tokens=max_tokens,
        stream=True,
    )
    pieces = 0
    for event in stream:
        if event.choices and event.choices[0].delta.content:
            pieces += 1
            print(event.choices[0].delta.content.replace("\n", "\n  | "), end="", flush=True)
    return pieces


def run_arm(url: str, prompts_ids: Sequence[Sequence[int]], *, relay: bool, max_new_tokens: int) -> RelayArm:
    """Answer all prompts one at a time with the relay switched on or off."""
    set_relay(url, relay)
    before = relay_state(url)
    label = "relay on " if relay else "relay off"
    began = time.monotonic()
    next_line_s = 10.0
    print(f"  {label}: answering {len(prompts_ids)} prompts", flush=True)

    def progress(done: int) -> None:
        nonlocal next_line_s
        spent_s = time.monotonic() - began
        if spent_s > next_line_s or done == len(prompts_ids):
            next_line_s = spent_s + 10.0
            print(f"  {label}: {done}/{len(prompts_ids)} prompts, {spent_s:.0f} s", flush=True)

    answers = generate_all(url, prompts_ids, concurrency=1, max_new_tokens=max_new_tokens, progress=progress)
    after = relay_state(url)
    eligible = after["eligible_rows"] - before["eligible_rows"]
    relayed = after["relayed_rows"] - before["relayed_rows"]
    return RelayArm(answers=answers, hit_rate=relayed / eligible if eligible else 0.0)


def _report(on: RelayArm, off: RelayArm) -> dict[str, Any]:
    tau_on, tau_off = mean_tau(on.answers), mean_tau(off.answers)
    equal = [a.output_ids for a in on.answers] == [b.output_ids for b in off.answers]
    tokens = sum(answer.tokens for answer in on.answers)
    print(f"\n  {'':>9}  {'tokens':>6}  {'verify steps':>12}  {'tokens per step (tau)':>21}  {'relayed rows':>12}")
    for label, arm, tau in (("relay on", on, tau_on), ("relay off", off, tau_off)):
        steps = sum(answer.verify_steps for answer in arm.answers)
        arm_tokens = sum(answer.tokens for answer in arm.answers)
        print(f"  {label:>9}  {arm_tokens:>6}  {steps:>12}  {tau:>21.3f}  {arm.hit_rate:>11.1%}")
    change = tau_on / tau_off - 1 if tau_off else 0.0
    print(f"  {len(on.answers)} held-out prompts; outputs equal: {'yes' if equal else 'NO'}")
    if change > 0:
        print(f"  With the relay tau is {change:.1%} higher on these prompts (one run of {len(on.answers)} prompts).")
    else:
        print(f"  The relay brings no gain with this drafter on these prompts: tau changes by {change:+.1%}.")
    return {
        "outputs_equal": equal,
        "tau_relay_on": round(tau_on, 4),
        "tau_relay_off": round(tau_off, 4),
        "relay_hit_rate": round(on.hit_rate, 4),
        "tokens": tokens,
        "prompts": len(on.answers),
        "versions": versions(),
    }


def _prompts_ids(target: Path, prompts: Sequence[Prompt]) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    return [prompt.token_ids(tokenizer) for prompt in prompts]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-dflow demo", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--drafter", type=Path, default=DEMO_DRAFTER)
    parser.add_argument("--prompts", type=Path, help="prompt file (default: 12 built-in prompts)")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; exit status 1 if the relay changed an output."""
    args = _parser().parse_args(argv)
    from sglang_dflow.demo_model import ensure_demo_target

    print("1. target: SmolLM2-135M-Instruct", flush=True)
    target = ensure_demo_target()
    prompts = demo_prompts() if args.prompts is None else read_prompts(args.prompts)
    # float32, so that "outputs equal" compares algorithms and not roundings of differently shaped batches.
    spec = ServerSpec(model=str(target), drafter=str(args.drafter), dtype="float32")
    print("2. server with --speculative-algorithm DFLOW", flush=True)
    with Server(spec, log=lambda text: print(f"  {text}", flush=True)) as server:
        started = [line for line in server.log_text().splitlines() if "DFLOW relay" in line]
        print(f"  {started[-1].split('] ')[-1]}" if started else "  (no relay line in the log)")
        print(f"3. streamed chat completion (OpenAI API): {CHAT_PROMPT}\n  | ", end="", flush=True)
        stream_chat(server.url, CHAT_PROMPT, args.max_new_tokens)
        print("\n4. the same prompts with the relay on and off", flush=True)
        prompts_ids = _prompts_ids(target, prompts)
        on = run_arm(server.url, prompts_ids, relay=True, max_new_tokens=args.max_new_tokens)
        off = run_arm(server.url, prompts_ids, relay=False, max_new_tokens=args.max_new_tokens)
    report = _report(on, off)
    print("5. server stopped")
    print(json.dumps(report), flush=True)
    return 0 if report["outputs_equal"] else 1
