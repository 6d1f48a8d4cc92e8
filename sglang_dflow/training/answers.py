"""The target's own answers to evaluation prompts, made in process and kept in a file.

A file belongs to one target (a fingerprint of its files is in the directory's name), set, temperature, seed and length,
and never to a drafter: captured states are not kept, the replay computes them, so one file serves every drafter of the
target. An answer is used again only for the very same prompt tokens.

At T = 0 loops are cut (generate.py): a looping target's text is trivially predictable. Sampled text is left as it came,
and is drawn from the whole distribution: no top-k, no top-p.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sglang_dflow.training.data import Answer, read_answers
from sglang_dflow.training.dataset import Sample
from sglang_dflow.training.generate import Sampling, generate_batch
from sglang_dflow.training.target import Target

Log = Callable[[str], None]

BATCH_ROWS = 32


def fingerprint(target: Path) -> str:
    """Short name of a target directory that changes when its files do."""
    digest = hashlib.sha256((target / "config.json").read_bytes())
    for file in sorted(target.glob("*.safetensors")):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return f"{target.resolve().name}-{digest.hexdigest()[:8]}"


def target_answers(
    target: Target,
    prompts: Sequence[tuple[str, list[int]]],  # (id, token ids)
    path: Path,
    *,
    temperature: float,
    seed: int,
    max_new_tokens: int,
    log: Log,
) -> list[Sample]:
    """Answer every prompt, or take its answer from ``path``; the file is written to as answers come."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {answer.id: answer for answer in (read_answers([path]) if path.exists() else [])}
    todo = [(name, ids) for name, ids in prompts if name not in known or known[name].prompt_ids != ids]
    for start in range(0, len(todo), BATCH_ROWS):
        batch = todo[start : start + BATCH_ROWS]
        # Its own seed for every batch: what earlier batches drew, or found in the file, does not matter.
        generator = torch.Generator(target.embedding.device).manual_seed(
            zlib.crc32(json.dumps([seed, temperature, [name for name, _ in batch]]).encode())
        )
        results = generate_batch(
            target, [ids for _, ids in batch], max_new_tokens, Sampling(temperature), generator,
            cut_loops=temperature == 0,
        )  # fmt: skip
        with path.open("a") as out:
            for (name, ids), result in zip(batch, results):
                known[name] = Answer(name, path.stem, ids, result.tokens, result.finish)
                out.write(json.dumps(known[name]._asdict()) + "\n")
        log(f"acceptance: {path.stem}, target answered {start + len(batch)}/{len(todo)} prompts")
    answers = [known[name] for name, _ in prompts]
    return [Sample(a.id, a.domain, torch.tensor(a.prompt_ids + a.answer_ids), len(a.prompt_ids), None) for a in answers]
