"""Prompts of one narrow domain: small Python functions over collections of numbers.

    python -m benchmarks.lab.narrow --out runs/lab/narrow            # train.jsonl, fresh.jsonl and eval.jsonl

A real target (SmolLM2) on a domain that a small drafter can learn well: the other laboratory, for the question whether
the relay's gain grows with the drafter's own tau. Operation, filter and collection are combined; the evaluation's
combinations are not in training, their parts are. ``train`` makes the drafter that all arms start from, ``fresh`` is
for the arms: a drafter knows the conversations that it was trained on by heart, and there is little left to relay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

OPERATIONS = [
    "returns the sum of", "returns the product of", "returns the average of", "returns the largest of",
    "returns the smallest of", "counts", "prints", "returns a list of", "returns the squares of", "sorts", "removes",
    "returns the positions of", "doubles", "returns a set of", "returns the first of", "returns the last of",
]  # fmt: skip
FILTERS = ["the even numbers", "the odd numbers", "the positive numbers", "the negative numbers", "the prime numbers"]
FILTERS += ["the elements that occur twice", "the perfect squares", "the numbers with two digits"]
FILTERS += [f"the numbers {how} {k}" for how in ("divisible by", "greater than", "less than") for k in (3, 5, 7, 10)]
COLLECTIONS = ["a list", "a tuple", "a set", "a dictionary's values", "nested lists", "a range", "a matrix"]
REQUESTS = [
    "Write a Python function that {}.",
    "Write a Python function that {}. Add a docstring.",
    "Implement a Python function that {}; show an example.",
]


def prompts(seed: int) -> list[str]:
    """All combinations, shuffled; one wording each."""
    rng = random.Random(seed)
    tasks = [f"{o} {f} in {c}" for o, f, c in itertools.product(OPERATIONS, FILTERS, COLLECTIONS)]
    rng.shuffle(tasks)
    return [rng.choice(REQUESTS).format(task) for task in tasks]


def write(path: Path, name: str, texts: list[str]) -> None:
    """One record a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": f"narrow/{name}-{number}", "turns": [text]}) for number, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--eval", type=int, default=60)
    parser.add_argument("--train", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    texts = prompts(args.seed)
    write(args.out / "eval.jsonl", "eval", texts[: args.eval])
    write(args.out / "train.jsonl", "train", texts[args.eval : args.eval + args.train])
    write(args.out / "fresh.jsonl", "fresh", texts[args.eval + args.train :])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
