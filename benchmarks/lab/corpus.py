"""The laboratory's text: functions of the Python standard library and SmolLM2's own answers.

A document is a prompt and what follows it: a function's signature with its docstring, and its body; a question, and
SmolLM2's greedy answer. Licences: the standard library is under the PSF licence, SmolLM2 under Apache-2.0.

Every prompt belongs to one part, by a hash of its text: ``target`` documents train the target, ``drafter`` prompts
are answered by the target to make the drafters' data, ``eval`` prompts measure them. No text crosses parts.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
import textwrap
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflow.training.data import read_answers
from sglang_dflow.training.prompts import BOXED, read_turns

PARTS = ("target", "drafter", "eval")
EVAL_PERCENT, DRAFTER_PERCENT = 4, 20  # of prompts; the rest trains the target
MIN_BODY, MAX_FUNCTION = 80, 1600  # characters of a function
MIN_ENTROPY = 0.30  # zlib size over text size: below it an answer repeats itself (a fifth of SmolLM2's answers, read)
MOST = {"drafter": 2500, "eval": 60}  # prompts of one set: the questions without an answer would drown the rest
SETS = {"function": "functions", "gsm8k": "maths", "math": "maths", "chat": "chat"}  # of a domain; the rest: "code"


class Document(NamedTuple):
    """A prompt and its continuation."""

    id: str
    domain: str  # "function", or the domain of the answers file
    prompt: str
    text: str  # continuation; empty for a prompt nobody has answered yet
    complete: bool  # the continuation ends here: train the end token


def part_of(prompt: str, answered: bool = True) -> str:
    """The part of a prompt; one that nobody has answered cannot train the target."""
    bucket = zlib.crc32(prompt.removesuffix(BOXED).strip().encode()) % 100
    if bucket < EVAL_PERCENT:
        return "eval"
    return "drafter" if bucket < EVAL_PERCENT + DRAFTER_PERCENT or not answered else "target"


def functions(library: Path) -> Iterator[Document]:
    """Functions of every module below ``library``, tests and installed packages left out."""
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        if any(part in ("site-packages", "test", "tests", "idle_test", "lib2to3") for part in Path(name).parts):
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old escapes in string literals
                tree = ast.parse(source)
        except SyntaxError:
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (document := _function(node, lines, name)) is not None:
                yield document


def _function(node: ast.FunctionDef, lines: list[str], module: str) -> Document | None:
    first = node.body[0]
    docstring = ast.get_docstring(node) is not None
    end = first.end_lineno if docstring else first.lineno - 1  # last line of the prompt
    assert end is not None and node.end_lineno is not None
    if len(lines[node.lineno - 1]) - len(lines[node.lineno - 1].lstrip()) != node.col_offset or end < node.lineno:
        return None  # a body on the line of its def
    text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).expandtabs(4)
    count = end - node.lineno + 1
    prompt, body = "\n".join(text.split("\n")[:count]), "\n".join(text.split("\n")[count:])
    if len(body) < MIN_BODY or len(text) > MAX_FUNCTION or not text.startswith("def "):
        return None
    return Document(f"function/{module}:{node.lineno}", "function", prompt, "\n" + body, True)


def answered(paths: Sequence[Path], tokenizer: Any) -> Iterator[Document]:
    """SmolLM2's answers, without those that loop or hardly say anything new."""
    for answer in read_answers(paths):
        turn = tokenizer.decode(answer.prompt_ids).split("<|im_start|>user\n")[-1]
        text = tokenizer.decode(answer.answer_ids, skip_special_tokens=True)
        entropy = len(zlib.compress(text.encode())) / max(len(text.encode()), 1)
        if answer.finish != "loop" and len(text) >= MIN_BODY and entropy >= MIN_ENTROPY:
            prompt = turn.split("<|im_end|>")[0]
            yield Document(answer.id, answer.domain, prompt, text, answer.finish == "eos")


def unanswered(path: Path) -> Iterator[Document]:
    """Prompts of a file ``{"id", "turns"}``."""
    for name, turns in read_turns(path):
        yield Document(name, name.split("-")[0], turns[0], "", False)


def collect(answers: Sequence[Path], tokenizer: Any, prompts: Path, library: Path | None = None) -> list[Document]:
    """All documents, shuffled, one for each prompt: the functions, the answers, then prompts without an answer."""
    library = library or Path(sysconfig.get_path("stdlib"))
    chosen: dict[str, Document] = {}
    for source in (functions(library), answered(answers, tokenizer), unanswered(prompts)):
        for document in source:
            chosen.setdefault(document.prompt.removesuffix(BOXED).strip(), document)
    documents = list(chosen.values())
    random.Random(0).shuffle(documents)
    return documents


def write(documents: Sequence[Document], folder: Path) -> None:
    """``corpus.jsonl`` for the target, and prompts ``{"id", "turns"}``: ``drafter/SET.jsonl`` for the drafter's data,
    ``eval/SET.jsonl`` to measure it."""
    lines: dict[str, list[str]] = {}
    for document in documents:
        part, of_set = part_of(document.prompt, bool(document.text)), SETS.get(document.domain, "code")
        if part == "target":
            lines.setdefault("corpus.jsonl", []).append(json.dumps(document._asdict()))
            continue
        chosen = lines.setdefault(f"{part}/{of_set}.jsonl", [])
        if len(chosen) < MOST[part]:
            chosen.append(json.dumps({"id": document.id, "turns": [document.prompt]}))
    for name, records in lines.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(record + "\n" for record in records))


def read(folder: Path) -> list[Document]:
    """The target's documents, as ``write`` left them."""
    return [Document(**json.loads(line)) for line in (folder / "corpus.jsonl").read_text().split("\n") if line]
