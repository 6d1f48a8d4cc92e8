"""What a rescorer's parts are worth: fitted with each alone and with both, on the rounds that `--examples` kept.

    sglang-dflow rescore --target DIR --drafter DRAFTER --answers answers.jsonl --examples rounds.safetensors --out DST
    python -m benchmarks.rescore_parts --target DIR --examples rounds.safetensors --threads 1

- `evidence`: signs and stale tokens, no codes: what verification knew.
- `codes`: the drafter's best tokens and the steps between them, no stale token, proposal or boundary: what any block
  could do, behind a rejection or not.
- `both`: as shipped.

One conversation in eight is held out (another choice than the command's). Tokens a round behind a rejection; the
interval resamples conversations (2,000 times). Output: one table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors import safe_open

from sglang_dflow.arguments import positive_int
from sglang_dflow.checkpoint_files import locate
from sglang_dflow.provenance import git_commit, machine, versions
from sglang_dflow.relay.rescore import CODE_SIZE, NONE, OFFSETS, RelayRescorer
from sglang_dflow.training.rescore import Examples, fit
from sglang_dflow.training.target import Target

PARTS = ("evidence", "codes", "both")


def without_evidence(examples: Examples) -> Examples:
    """The same rounds as if nothing had been verified before them."""
    tokens = examples.tokens.clone()
    tokens[..., -len(OFFSETS) :] = NONE
    nothing = torch.full_like(examples.stale, NONE)
    nobody = torch.full_like(examples.rejected, NONE)
    return examples._replace(tokens=tokens, stale=nothing, proposed=nothing, rejected=nobody)


def tokens_a_round(chosen: torch.Tensor, examples: Examples) -> torch.Tensor:
    """Float [N], the bonus included."""
    return 1.0 + ((chosen == examples.labels) & examples.valid).long().cumprod(-1).sum(-1).float()


@torch.no_grad()
def ratio(before: torch.Tensor, after: torch.Tensor, conversation: torch.Tensor) -> tuple[float, float, float]:
    """After / before with its 95 % interval."""
    numbers, of_round = conversation.unique(return_inverse=True)
    sums = torch.zeros(2, len(numbers)).index_add_(1, of_round, torch.stack((before, after)))
    draws = torch.randint(len(numbers), (2000, len(numbers)), generator=torch.Generator().manual_seed(0))
    low, high = (sums[1][draws].sum(1) / sums[0][draws].sum(1)).quantile(torch.tensor([0.025, 0.975])).tolist()
    return float(after.sum() / before.sum()), low, high


def main() -> int:
    """Fit, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--examples", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--size", type=positive_int, default=128)
    parser.add_argument("--code-size", type=positive_int, default=CODE_SIZE)
    parser.add_argument("--epochs", type=positive_int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=positive_int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with safe_open(args.examples, "pt") as handle:
        rounds = Examples(*(handle.get_tensor(name) for name in Examples._fields))
    embedding = Target.load(locate(args.target), torch.bfloat16, [0]).embedding
    held_out = rounds.conversation % 8 == 7
    train, test = rounds.of(~held_out), rounds.of(held_out)
    drafts = tokens_a_round(test.tokens[..., 0], test)
    print(f"{len(train.bonus)} rounds to fit, {len(test.bonus)} held out, drafts {float(drafts.mean()):.3f}")
    print("| part | tokens a round | ratio | s |\n|---|---|---|---|")
    measured = []
    for part in args.parts:
        torch.manual_seed(args.seed)
        sizes = {"top_k": rounds.tokens.shape[-1] - len(OFFSETS), "code_size": args.code_size}
        block_size, hidden_size = rounds.tokens.shape[1] + 1, rounds.hidden.shape[-1]
        rescorer = RelayRescorer(block_size, hidden_size, args.size, **sizes)
        rescorer.gate.requires_grad_(part != "evidence")
        seen_train, seen = (without_evidence(found) if part == "codes" else found for found in (train, test))

        def codes(tokens: torch.Tensor, rescorer: RelayRescorer = rescorer) -> torch.Tensor:
            return rescorer.codes(embedding[tokens.clamp_min(0)])

        started = time.monotonic()
        fit(rescorer, seen_train, codes, args.epochs, args.seed)
        with torch.no_grad():  # behind the text's own tokens: a row counts only if all before it took those
            chosen = torch.cat(
                [
                    part.tokens.gather(-1, rescorer(part.look, codes, part.before).argmax(-1, keepdim=True)).squeeze(-1)
                    for part in (seen.of(rows) for rows in torch.arange(len(seen.bonus)).split(1024))
                ]
            )
        after = tokens_a_round(chosen, seen)
        found = ratio(drafts, after, test.conversation)
        seconds = time.monotonic() - started
        print(
            f"| {part} | {float(after.mean()):.3f} | {found[0]:.4f} ({found[1]:.3f}..{found[2]:.3f}) | {seconds:.0f} |",
            flush=True,
        )
        measured.append({"part": part, "tokens_a_round": float(after.mean()), "ratio": found})
    made_with = {"versions": versions() | {"git_commit": git_commit()}, "machine": machine()}
    print(
        json.dumps(
            {
                "examples": str(args.examples),
                "seed": args.seed,
                "code_size": args.code_size,
                "epochs": args.epochs,
                "measured": measured,
                **made_with,
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
