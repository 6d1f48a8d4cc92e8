"""Evaluation prompts: from files, or the public sets by name where a hub is reachable.

The wording around the public sets' questions is the DFlash family's, as in the files of this project's own tables.
Only first turns are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflow.prompts import Prompt, read_prompts
from sglang_dflow.training.prompts import BOXED, TESTED

Record = Mapping[str, Any]


@dataclass(frozen=True)
class PublicSet:
    """A hub data set and how a prompt is made of a record."""

    repository: str
    split: str
    text: Callable[[Record], str]
    subset: str | None = None


def _alpaca(record: Record) -> str:
    return f"{record['instruction']}\n\nInput:\n{record['input']}" if record["input"] else str(record["instruction"])


PUBLIC_SETS: dict[str, PublicSet] = {
    "gsm8k": PublicSet("openai/gsm8k", "test", lambda r: r["question"] + BOXED, subset="main"),
    "math500": PublicSet("HuggingFaceH4/MATH-500", "test", lambda r: r["problem"] + BOXED),
    "humaneval": PublicSet("openai/openai_humaneval", "test", lambda r: f"{TESTED}{r['prompt']}\n```"),
    "mbpp": PublicSet("google-research-datasets/mbpp", "test", lambda r: str(r["prompt"]), subset="sanitized"),
    "mt_bench": PublicSet("HuggingFaceH4/mt_bench_prompts", "train", lambda r: str(r["prompt"][0])),
    "alpaca": PublicSet("tatsu-lab/alpaca", "train", _alpaca),
}


def load_prompts(source: str, limit: int) -> tuple[str, list[Prompt]]:
    """Return (name, at most ``limit`` prompts) of a prompt file (its first) or a public set (a fixed shuffle's first).

    Raises:
        ValueError: neither a file nor a known name, or the set cannot be had here.
    """
    path = Path(source)
    if path.is_file():
        return path.stem, read_prompts(path)[:limit]
    if source not in PUBLIC_SETS:
        raise ValueError(
            f'--prompts {source} is neither a file (JSON lines {{"id", "turns"}}) nor one of the public sets '
            f"{sorted(PUBLIC_SETS)}."
        )
    return source, _from_hub(source, PUBLIC_SETS[source], limit)


def _from_hub(name: str, public: PublicSet, limit: int) -> list[Prompt]:
    remedy = f'Give a prompt file instead: JSON lines {{"id": "{name}/0", "turns": ["text"]}}.'
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(f"--prompts {name} needs the datasets package (pip install datasets). {remedy}") from error
    try:
        table = load_dataset(public.repository, public.subset, split=public.split)
    except (OSError, ValueError) as error:  # no network, no such data set or subset
        raise ValueError(f"--prompts {name}: the hub did not give {public.repository} ({error}). {remedy}") from error
    rows = table.add_column("row", list(range(len(table)))).shuffle(seed=0)
    return [Prompt(f"{name}/{row['row']}", public.text(row)) for row in rows.select(range(min(limit, len(rows))))]
