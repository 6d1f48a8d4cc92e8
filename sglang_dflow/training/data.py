"""``sglang-dflow prepare-data``: prompts -> the target's own answers, with their captured states if wanted.

Owns the answers files and the order of the work. An answers file is JSON lines ``{"id", "domain", "prompt_ids",
"answer_ids", "finish"}``, only ever appended to, a batch at a time: an interrupted run goes on by skipping the ids
that are already there. Beside ``answers.jsonl`` are ``answers.prompts.json``, the chosen prompts and the settings they
are answered with (a run goes on with these or not at all), and ``answers.states/``, the captured states (states.py).

Prompts, their sources and the guard against evaluation sets: prompts.py. Generation: generate.py in this process,
answer_server.py through a running SGLang server.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sglang_dflow.training.answer_server import ServerGenerate
from sglang_dflow.training.generate import (
    Generate,
    Generated,
    LocalGenerate,
    Sampling,
)
from sglang_dflow.training.prompts import (
    SEEDS,
    Conversation,
    Log,
    Mix,
    Prompt,
    Source,
    answer_id,
    chat_ids,
    collect,
)
from sglang_dflow.training.states import StateWriter, capture_each, check_room, states_dir
from sglang_dflow.training.target import Target

GREEDY = Sampling()


class Answer(NamedTuple):
    """The target's own continuation of a prompt."""

    id: str
    domain: str
    prompt_ids: list[int]
    answer_ids: list[int]
    finish: str  # "eos", "length" or "loop"


# --- answer files ----------------------------------------------------------------------------------------


def read_answers(paths: Sequence[str | Path]) -> list[Answer]:
    """Read answer files; a torn last line of an interrupted run is ignored.

    Raises:
        ValueError: any other line that is no answer.
    """
    answers = []
    for path in paths:
        lines = Path(path).read_text().split("\n")
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                answers.append(Answer(**json.loads(line)))
            except (json.JSONDecodeError, TypeError) as error:
                if number == len(lines):
                    continue
                raise ValueError(
                    f"{path}:{number}: {error}; expected an answer with the fields {', '.join(Answer._fields)}. "
                    "Remedy: delete the line; prepare-data answers its prompt again."
                ) from error
    return answers


def _drop_torn_line(path: Path) -> None:
    """Cut what stands behind the last line break, or the next line would be glued to it."""
    with path.open("rb+") as file:
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)


def state_rows(answer: Answer) -> int:
    """Rows of an answer's captured states: every token but the last, whose state nothing reads."""
    return len(answer.prompt_ids) + len(answer.answer_ids) - 1


def answer_prompts(
    target: Target | None,
    prompts: Sequence[Prompt],
    path: Path,
    max_new_tokens: int,
    batch_rows: int,
    deadline: float,
    log: Log,
    *,
    generate: Generate | None = None,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    states: bool = True,
    target_name: str = "",
) -> bool:
    """Answer and append to ``path``; skips answered ids, stops at ``deadline`` (``time.monotonic``).

    ``generate`` defaults to this process. The answers of a batch depend on ``seed`` and the batch alone, so an
    interrupted run gives the same file in the end; a batch of which only a part was written is completed with fresh
    draws. States of answers that a server made are computed by one prefill pass of ``target``.

    Returns:
        Whether every prompt is answered.

    Raises:
        ValueError: no ``target`` though states or in-process answers are wanted.
        RuntimeError: no room for the states.
    """
    if target is None and (states or generate is None):
        raise ValueError("answer_prompts needs the target itself for states or answers in this process")
    if generate is None and target is not None:
        generate = LocalGenerate(target)
    assert generate is not None
    if path.exists():
        _drop_torn_line(path)
    done = {answer.id for answer in read_answers([path])} if path.exists() else set()
    todo = [prompt for prompt in prompts if prompt.id not in done]
    log(f"data: {len(todo)} of {len(prompts)} prompts to answer")
    if not todo:
        return True
    writer = None
    if states and target is not None:
        size = _most_state_bytes(target, todo, max_new_tokens)
        log(f"data: captured states go to {states_dir(path)}, at most {size / 1e6:,.1f} MB")
        check_room(states_dir(path), size)
        writer = StateWriter(states_dir(path), target.target_layer_ids, target_name)
    progress = _Progress(len(todo), log)
    with path.open("a") as out:
        for whole in _length_sorted(prompts, batch_rows):
            batch = [prompt for prompt in whole if prompt.id not in done]
            if not batch:
                continue
            if time.monotonic() > deadline:
                log("data: time budget reached; the same command goes on from here")
                return False
            draw = zlib.crc32(f"{seed}/{whole[0].id}".encode())
            results = generate([prompt.ids for prompt in batch], max_new_tokens, sampling, draw, writer is not None)
            if writer is not None and target is not None:
                # Before the lines: a state without its line is ignored, a line without its state is not.
                writer.write([prompt.id for prompt in batch], _states(target, batch, results))
            lines = [
                json.dumps(Answer(p.id, p.domain, p.ids, result.tokens, result.finish)._asdict()) + "\n"
                for p, result in zip(batch, results)
            ]
            out.write("".join(lines))
            out.flush()
            progress.add(len(batch), sum(len(result.tokens) for result in results))
    return True


def _most_state_bytes(target: Target, prompts: Sequence[Prompt], max_new_tokens: int) -> int:
    row_bytes = 2 * target.shape.hidden_size * len(target.target_layer_ids)
    return sum(len(prompt.ids) + max_new_tokens - 1 for prompt in prompts) * row_bytes


def _states(target: Target, prompts: Sequence[Prompt], results: Sequence[Generated]) -> list[torch.Tensor]:
    """States [rows, m * H] of each answer: kept while it was made, else by one prefill pass."""
    kept = [result.states for result in results if result.states is not None]
    if len(kept) == len(results):
        return kept
    return capture_each(target, [prompt.ids + result.tokens[:-1] for prompt, result in zip(prompts, results)])


class _Progress:
    """One line a batch: how far, how fast, how long still."""

    def __init__(self, total: int, log: Log) -> None:
        self.total, self.log, self.started = total, log, time.monotonic()
        self.prompts = self.tokens = 0

    def add(self, prompts: int, tokens: int) -> None:
        self.prompts += prompts
        self.tokens += tokens
        seconds = max(time.monotonic() - self.started, 1e-6)
        left = seconds / self.prompts * (self.total - self.prompts)
        self.log(
            f"data: {self.prompts} of {self.total} prompts, {self.tokens} tokens, "
            f"{self.tokens / seconds:.0f} tokens/s, about {left / 60:.1f} min left"
        )


def _length_sorted(prompts: Sequence[Prompt], batch_rows: int, window: int = 4) -> Iterator[list[Prompt]]:
    """Batches of similar prompt length, taken from windows so that early batches already mix the domains."""
    for start in range(0, len(prompts), window * batch_rows):
        chunk = sorted(prompts[start : start + window * batch_rows], key=lambda prompt: len(prompt.ids))
        for offset in range(0, len(chunk), batch_rows):
            yield chunk[offset : offset + batch_rows]


# --- conversations ---------------------------------------------------------------------------------------


def turn_prompts(
    conversations: Sequence[Conversation], tokenizer: Any, answers: dict[str, Answer], turn: int, samples: int
) -> list[Prompt]:
    """The requests of one turn, ``samples`` a conversation, each behind its own earlier answers.

    A conversation ends where an answer was cut (length or loop): no server would have gone on from there.
    """
    prompts = []
    for conversation in conversations:
        for sample in range(samples if turn < len(conversation.turns) else 0):
            history = [answers.get(answer_id(conversation.id, sample, earlier)) for earlier in range(turn)]
            messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
            for text, answer in zip(conversation.turns, history):
                if answer is None or answer.finish != "eos":
                    break
                said = tokenizer.decode(answer.answer_ids, skip_special_tokens=True)
                messages += [{"role": "user", "content": text}, {"role": "assistant", "content": said}]
            else:
                messages.append({"role": "user", "content": conversation.turns[turn]})
                name = answer_id(conversation.id, sample, turn)
                prompts.append(Prompt(name, conversation.domain, chat_ids(tokenizer, messages)))
    return prompts


def answer_conversations(
    target: Target | None,
    tokenizer: Any,
    conversations: Sequence[Conversation],
    path: Path,
    *,
    max_new_tokens: int,
    max_prompt_tokens: int,
    batch_rows: int,
    deadline: float,
    log: Log,
    turns: str = "first",
    samples: int = 1,
    **settings: Any,
) -> bool:
    """``answer_prompts`` turn after turn (``turns="all"``) or for the first turn only.

    Longer prompts than ``max_prompt_tokens`` are left out. ``settings`` go to ``answer_prompts``.
    """
    rounds = max((len(c.turns) for c in conversations), default=0) if turns == "all" else 1
    for turn in range(rounds):
        answers = {answer.id: answer for answer in read_answers([path])} if turn else {}
        prompts = turn_prompts(conversations, tokenizer, answers, turn, samples)
        fitting = [prompt for prompt in prompts if len(prompt.ids) <= max_prompt_tokens]
        if len(fitting) < len(prompts):
            log(f"data: {len(prompts) - len(fitting)} prompts above {max_prompt_tokens} tokens left out")
        if rounds > 1:
            log(f"data: turn {turn + 1} of {rounds}")
        if not answer_prompts(target, fitting, path, max_new_tokens, batch_rows, deadline, log, **settings):
            return False
    return True


# --- the command -----------------------------------------------------------------------------------------


def _pairs(text: str) -> dict[str, float]:
    """``a=1,b=0.5`` as a dictionary."""
    pairs = [item.partition("=") for item in text.split(",") if item]
    try:
        return {name.strip(): float(value) for name, _, value in pairs}
    except ValueError as error:
        raise ValueError(f"{text!r} is not NAME=NUMBER[,NAME=NUMBER ..]") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-dflow prepare-data",
        description="Prompts -> the target's own answers, the training data of a drafter. An interrupted run goes on "
        "when the same command is given again.",
    )
    parser.add_argument("--target", required=True, help="Hugging Face directory of the target")
    parser.add_argument("--out", type=Path, required=True, help="answers file (.jsonl), appended to")
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompts", nargs="+", default=[], metavar="FILE_OR_DATASET[:COUNT[:DOMAIN]]",
        help="JSON lines (turns, prompt, question, messages or ShareGPT conversations), or a hub data set "
        "OWNER/NAME[@SPLIT[@CONFIG]]; COUNT random ones of it, all by default",
    )  # fmt: skip
    group.add_argument(
        "--self", dest="own", default="", metavar="DOMAIN=N,..",
        help=f"prompts that the target writes itself; domains: {', '.join(SEEDS)}",
    )  # fmt: skip
    group.add_argument(
        "--boxed", default="", metavar="DOMAIN=SHARE,..", help="ask for a boxed answer in this share of a domain"
    )
    group.add_argument(
        "--hold-out", nargs="+", default=[], metavar="FILE", help="evaluation sets: refuse their prompts"
    )
    group.add_argument(
        "--exclude", nargs="+", default=[], metavar="FILE", help="answers files: skip their prompts' ids"
    )
    group.add_argument("--turns", choices=["first", "all"], default="first", help="how many turns to answer")
    group.add_argument("--max-prompt-tokens", type=int, default=2048, help="leave longer prompts out")
    group.add_argument("--shard", default="0/1", help="i/n: this process answers part i of n")
    group = parser.add_argument_group("answers")
    group.add_argument("--max-new-tokens", type=int, default=320)
    group.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--samples-per-prompt", type=int, default=1)
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--server", metavar="URL", help="let this running SGLang server answer, not this process")
    group.add_argument("--batch-rows", type=int, default=96, help="prompts a batch")
    group.add_argument("--minutes", type=float, default=0.0, help="start no batch after this long; 0: no limit")
    group.add_argument("--threads", type=int, default=0)
    group = parser.add_argument_group("captured states")
    group.add_argument(
        "--states", action=argparse.BooleanOptionalAction, default=True,
        help="store the target's states (2 x m x H bytes a token); without them training computes them",
    )  # fmt: skip
    group.add_argument("--target-layer-ids", default="1,8,15,22,28", help="captured layers")
    group.add_argument("--device", default="cpu", help="where the target runs in this process, e.g. cuda")
    return parser


def _problems(args: argparse.Namespace) -> list[str]:
    problems = []
    if not args.prompts and not args.own:
        problems.append("no prompts: give --prompts, --self, or both")
    if args.samples_per_prompt > 1 and args.temperature == 0.0:
        problems.append("--samples-per-prompt above 1 needs --temperature above 0: greedy answers are all the same")
    if args.temperature < 0.0 or not 0.0 < args.top_p <= 1.0:
        problems.append("--temperature is at least 0, --top-p in (0, 1]")
    index, _, count = args.shard.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        problems.append(f"--shard {args.shard!r} is not i/n with 0 <= i < n")
    if args.out.suffix != ".jsonl":
        problems.append(f"--out {args.out} does not end in .jsonl")
    return problems


def _plan(args: argparse.Namespace, generate: Generate, tokenizer: Any, log: Log) -> list[Conversation]:
    """The conversations of this answers file: chosen once, then kept beside it.

    Raises:
        ValueError: the file was begun with other settings.
    """
    names = ("target", "prompts", "own", "boxed", "hold_out", "turns", "max_prompt_tokens", "shard", "max_new_tokens",
             "temperature", "top_p", "samples_per_prompt", "seed", "target_layer_ids")  # fmt: skip
    settings = {name: getattr(args, name) for name in names}
    plan_file = args.out.with_suffix(".prompts.json")
    if plan_file.exists():
        plan = json.loads(plan_file.read_text())
        begun = plan["settings"] if isinstance(plan, dict) else {}
        changed = [
            f"{name} {begun.get(name)!r} -> {value!r}" for name, value in settings.items() if begun.get(name) != value
        ]
        if changed:
            raise ValueError(
                f"{args.out} was begun with other settings: {'; '.join(changed)}. Remedy: another --out, or the "
                f"settings in {plan_file}."
            )
        return [Conversation(**fields) for fields in plan["conversations"]]
    shard, shards = (int(part) for part in args.shard.split("/"))
    mix = Mix(
        [Source.parse(text) for text in args.prompts],
        {name: int(count) for name, count in _pairs(args.own).items()},
        _pairs(args.boxed),
        args.hold_out,
        [answer.id for answer in read_answers([p for p in args.exclude if Path(p).resolve() != args.out.resolve()])],
        args.seed,
        shard,
        shards,
    )  # fmt: skip
    conversations = collect(mix, generate, tokenizer, log)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    part = plan_file.with_suffix(".part")
    part.write_text(json.dumps({"settings": settings, "conversations": [c._asdict() for c in conversations]}))
    part.replace(plan_file)
    return conversations


def main(argv: list[str] | None = None) -> int:
    """``sglang-dflow prepare-data``: prompts -> the target's own answers."""
    parser = _parser()
    args = parser.parse_args(argv)
    problems = _problems(args)
    if problems:
        parser.error("; ".join(problems))
    if args.threads:
        torch.set_num_threads(args.threads)
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        return 0 if _run(args, deadline, log) else 3
    except (ValueError, RuntimeError) as error:
        log(f"prepare-data: {error}")
        return 1


def _run(args: argparse.Namespace, deadline: float, log: Log) -> bool:
    from transformers import AutoTokenizer

    server = ServerGenerate(args.server) if args.server else None
    if server is not None:
        log(f"data: {server.url} serves {server.model_path()}; it must be the model of --target")
    target = None
    if server is None or args.states:
        layer_ids = [int(part) for part in args.target_layer_ids.split(",")]
        target = Target.load(args.target, torch.bfloat16, layer_ids, args.device)
        longest = args.max_prompt_tokens + args.max_new_tokens
        if longest > target.shape.max_position_embeddings:
            raise ValueError(
                f"--max-prompt-tokens + --max-new-tokens is {longest}, the target has "
                f"{target.shape.max_position_embeddings} positions. Remedy: lower one of them."
            )
    generate: Generate
    if server is not None:
        generate = server
    else:
        assert target is not None
        generate = LocalGenerate(target)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    conversations = _plan(args, generate, tokenizer, log)
    return answer_conversations(
        target,
        tokenizer,
        conversations,
        args.out,
        max_new_tokens=args.max_new_tokens,
        max_prompt_tokens=args.max_prompt_tokens,
        batch_rows=args.batch_rows,
        deadline=deadline,
        log=log,
        turns=args.turns,
        samples=args.samples_per_prompt,
        generate=generate,
        sampling=Sampling(args.temperature, args.top_p),
        seed=args.seed,
        states=args.states,
        target_name=args.target,
    )


if __name__ == "__main__":
    raise SystemExit(main())
