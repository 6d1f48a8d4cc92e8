"""What every arm is asked: models, prompts, settings. Shared by the sweep and the cost run."""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflow.arguments import positive_int
from sglang_dflow.bench.arms import Models
from sglang_dflow.demo import DEMO_DRAFTER
from sglang_dflow.demo_model import ensure_demo_target
from sglang_dflow.prompts import Prompt, varied_prompts
from sglang_dflow.provenance import git_commit, machine, versions
from sglang_dflow.server import has_cuda
from sglang_dflow.training.answers import fingerprint
from sglang_dflow.training.prompt_sets import PUBLIC_SETS, load_prompts


class Workload(NamedTuple):
    """Prompts and their token ids, in the order in which every arm answers them."""

    prompts: list[Prompt]
    ids: list[list[int]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the sweep and the cost run."""
    parser.add_argument("--target", help="directory or hub id (default: the demo target)")
    parser.add_argument("--drafter", help="DFlow drafter (default: the demo drafter)")
    parser.add_argument(
        "--prompts", nargs="+", metavar="SET",
        help=f"prompt files or names ({', '.join(PUBLIC_SETS)}), one of each in turn (default: 36 built-in chats)",
    )  # fmt: skip
    parser.add_argument("--requests", type=positive_int, default=32, help="prompts per point (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=positive_int, default=128, help="per answer (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16" if has_cuda() else "float32"
    )
    parser.add_argument("--server-args", default="", help="further sglang.launch_server arguments, one string")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="run directory (default: %(default)s)")


def levels(text: str) -> list[int]:
    """Concurrencies, for ``argparse``: increasing positive integers, separated by commas."""
    values = [positive_int(part) for part in text.split(",")]
    if values != sorted(set(values)):
        raise argparse.ArgumentTypeError(f"{text} is not increasing")
    return values


def models(args: argparse.Namespace) -> Models:
    """The models; the demo pair unless both target and drafter are given.

    Raises:
        ValueError: only one of the two is given.
    """
    if (args.target is None) != (args.drafter is None):
        raise ValueError("give both --target and --drafter, or neither for the demo pair")
    target = args.target or str(ensure_demo_target())
    extra = {name: getattr(args, name, None) for name in ("dflash", "domino", "eagle3")}
    return Models(target, args.drafter or str(DEMO_DRAFTER), **extra)


def workload(args: argparse.Namespace, target: str, count: int) -> Workload:
    """Return `count` prompts, one of each set in turn, as the model's chat template wraps them.

    Raises:
        ValueError: there are fewer.
    """
    from transformers import AutoTokenizer

    sets = [load_prompts(source, count)[1] for source in args.prompts] if args.prompts else _built_in()
    prompts = [one[i] for i in range(max(map(len, sets))) for one in sets if i < len(one)][:count]
    if len(prompts) < count:
        raise ValueError(f"{count} prompts are needed (--requests, or the highest concurrency), found {len(prompts)}")
    tokenizer = AutoTokenizer.from_pretrained(target)
    return Workload(prompts, [prompt.token_ids(tokenizer) for prompt in prompts])


def _built_in() -> list[list[Prompt]]:
    groups = ("maths/", "code/", "chat/")
    return [[prompt for prompt in varied_prompts() if prompt.id.startswith(group)] for group in groups]


def settings(args: argparse.Namespace, served: Models, asked: Workload, **more: Any) -> dict[str, Any]:
    """What two parts of one run must share."""
    return {
        "models": {role: name and _identity(name) for role, name in served._asdict().items()},
        "prompts": hashlib.sha256(json.dumps(asked.ids).encode()).hexdigest()[:12],
        "requests": args.requests,
        "max_new_tokens": args.max_new_tokens,
        "dtype": args.dtype,
        "server_args": args.server_args,
        "git_commit": git_commit(),
        "versions": versions(),
        "machine": machine(),
        **more,
    }


def _identity(name: str) -> str:
    return fingerprint(Path(name)) if Path(name).is_dir() else name


def command(name: str, argv: Sequence[str] | None) -> str:
    """The command line, as it can be given again."""
    return shlex.join(["sglang-dflow", "bench", name, *(sys.argv[1:] if argv is None else argv)])
