"""``sglang-dflow rescore``: give a drafter a rescorer (``relay/rescore.py``), fitted on its own rounds.

Drafter and target stay as they are. The drafter is replayed over the target's answers, as served; every round that
follows a rejection is an example: four tokens a row, the drafter's logits of them, which one the text took. The
network is small enough to be fitted on all of them in minutes. Conversations are held out by a hash of their names, and
what the command prints is measured on those. Acceptance on other prompts is `sglang-dflow acceptance`'s business.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sglang_dflow.arguments import positive_int
from sglang_dflow.checkpoint_files import locate
from sglang_dflow.config import RESCORE_FIELDS
from sglang_dflow.provenance import git_commit, machine, versions
from sglang_dflow.relay.rescore import CODE_SIZE, TOP_K, Evidence, Look, RelayRescorer, TokenCodes
from sglang_dflow.training.convert import attach_rescorer, make_empty
from sglang_dflow.training.dataset import Sample, load_sequences, split_held_out
from sglang_dflow.training.drafter import Drafter
from sglang_dflow.training.replay import replay
from sglang_dflow.training.rollout import token_codes
from sglang_dflow.training.target import Target

Log = Callable[[str], None]

_CONVERSATIONS_AT_ONCE = 32
_DROPOUT = 0.7  # of the products of codes, which else learn the texts by heart


class Examples(NamedTuple):
    """Rounds behind a rejection, N of them; R = B - 1 rows, C candidates."""

    tokens: torch.Tensor  # int64 [N, R, C]
    logits: torch.Tensor  # [N, R, C]
    hidden: torch.Tensor  # [N, R, H]
    stale: torch.Tensor  # int64 [N, R]
    bonus: torch.Tensor  # int64 [N]
    rejected: torch.Tensor  # int64 [N]
    proposed: torch.Tensor  # int64 [N, R]
    labels: torch.Tensor  # int64 [N, R]
    valid: torch.Tensor  # bool [N, R]
    conversation: torch.Tensor  # int64 [N]

    def of(self, chosen: torch.Tensor) -> Examples:
        """The chosen ones."""
        return Examples(*(field[chosen] for field in self))

    @property
    def look(self) -> Look:
        """What the rescorer sees."""
        evidence = Evidence(self.stale, self.bonus, self.rejected, self.proposed)
        return Look(self.tokens, self.logits, self.hidden, evidence)

    @property
    def before(self) -> torch.Tensor:
        """The text's token in front of every row, int64 [N, R]."""
        return torch.cat((self.bonus.unsqueeze(1), self.labels[:, :-1]), dim=1)


class Fit(NamedTuple):
    """Tokens per round on held-out rounds behind a rejection."""

    rounds: int
    drafts: float  # of the drafter alone
    rescored: float


def with_rescorer(drafter: Drafter, size: int, top_k: int = TOP_K, code_size: int = CODE_SIZE) -> Drafter:
    """Return the drafter with a rescorer of these sizes that changes nothing yet, in place of what it had.

    Raises:
        ValueError: it has no relay that keeps stale tokens, or a head that chooses its drafts one by one.
    """
    if not (drafter.config.relay_hidden_size and drafter.config.relay_stale_token) or drafter.domino is not None:
        raise ValueError(
            f"this drafter has relay_hidden_size {drafter.config.relay_hidden_size}, relay_stale_token "
            f"{drafter.config.relay_stale_token}, projector_type {drafter.config.projector_type}; expected a relay "
            "with the stale token and the plain head. Remedy: `sglang-dflow convert --relay-stale-token SRC DST`."
        )
    sizes: dict[str, Any] = dict(zip(RESCORE_FIELDS, (size, top_k, code_size)))
    new = Drafter(dataclasses.replace(drafter.config, **sizes))
    old = {name: tensor for name, tensor in drafter.state_dict().items() if ".relay_rescore." not in name}
    new.load_state_dict(old, strict=False)
    return new


def collect(drafter: Drafter, target: Target, samples: Sequence[Sample], log: Log = print) -> Examples:
    """Replay a drafter with a rescorer over the samples; its rounds behind a rejection."""
    parts: list[Examples] = []
    started, rounds = time.monotonic(), 0
    for first in range(0, len(samples), _CONVERSATIONS_AT_ONCE):

        def observe(
            numbers: torch.Tensor, look: Look, labels: torch.Tensor, valid: torch.Tensor, first: int = first
        ) -> None:
            kept = (look.evidence.stale >= 0).any(-1)
            found = Examples(*look[:3], *look.evidence, labels[:, 1:], valid[:, 1:], first + numbers)
            parts.append(found.of(kept))

        part = samples[first : first + _CONVERSATIONS_AT_ONCE]
        rounds += replay(drafter, target, part, relay=True, observe=observe).rounds
        rate = rounds / (time.monotonic() - started)
        log(f"rescore: {first + len(part)}/{len(samples)} conversations, {rounds} rounds, {rate:.0f} rounds/s")
    return Examples(*(torch.cat(fields) for fields in zip(*parts)))


def candidate_loss(
    rescorer: RelayRescorer, examples: Examples, codes: TokenCodes, dropout: float = 0.0
) -> torch.Tensor:
    """Cross entropy of the text's token among a row's candidates, where it is one of them, behind the text before it.

    Teacher forcing loses nothing for acceptance: a row counts only if all before it took the text's tokens.
    A row counts fully if the drafter alone was right in all rows before it, else by a fifth: it is seldom reached.
    """
    scores = rescorer(examples.look, codes, examples.before, dropout)  # [N, R, C]
    hit = (examples.tokens == examples.labels.unsqueeze(-1)) & scores.isfinite()
    right = (examples.tokens[..., 0] == examples.labels).float()
    reached = torch.cat((torch.ones_like(right[:, :1]), right.cumprod(-1)[:, :-1]), dim=1)
    weight = (0.2 + 0.8 * reached) * (hit.any(-1) & examples.valid)
    log_share = scores.log_softmax(-1).masked_fill(~hit, float("-inf")).logsumexp(-1)  # a token is a candidate once
    return -(torch.where(weight > 0, log_share, 0.0) * weight).sum() / weight.sum().clamp_min(1.0)


def fit(
    rescorer: RelayRescorer, examples: Examples, codes: TokenCodes, epochs: int, seed: int, batch: int = 256
) -> None:
    """Fit by AdamW with a cosine schedule."""
    generator = torch.Generator("cpu").manual_seed(seed)
    count = len(examples.bonus)
    steps = epochs * math.ceil(count / batch)
    optimizer = torch.optim.AdamW(rescorer.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.05)
    for _ in range(epochs):
        for chosen in torch.randperm(count, generator=generator, device="cpu").split(batch):
            loss = candidate_loss(rescorer, examples.of(chosen.to(examples.bonus.device)), codes, _DROPOUT)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(rescorer.parameters(), 1.0)
            optimizer.step()
            schedule.step()


@torch.no_grad()
def measure(rescorer: RelayRescorer, examples: Examples, codes: TokenCodes) -> Fit:
    """Tokens per round, drafts alone and rescored."""
    rows = torch.arange(len(examples.bonus)).split(1024)
    chosen = torch.cat([rescorer.choose(examples.of(part).look, codes) for part in rows])

    def tau(tokens: torch.Tensor) -> float:
        right = (tokens == examples.labels) & examples.valid
        return 1.0 + float(right.long().cumprod(-1).sum(-1).float().mean())

    return Fit(len(examples.bonus), tau(examples.tokens[..., 0]), tau(chosen))


def main(argv: Sequence[str] | None = None) -> int:
    """Fit a rescorer to a drafter and write the drafter with it; last line JSON: what it gained on held-out rounds."""
    parser = argparse.ArgumentParser(prog="sglang-dflow rescore", description=main.__doc__)
    parser.add_argument("--target", required=True, help="directory or hub id")
    parser.add_argument("--drafter", required=True, help="directory or hub id of a DFlow drafter with the stale token")
    parser.add_argument("--answers", nargs="+", required=True, help="files of `sglang-dflow prepare-data`")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; must not exist or be empty")
    parser.add_argument("--conversations", type=positive_int, default=2000, help="at most so many")
    parser.add_argument("--size", type=positive_int, default=128, help="width of the network (default: %(default)s)")
    parser.add_argument("--top-k", type=positive_int, default=TOP_K, help="the drafter's best tokens to choose from")
    parser.add_argument("--code-size", type=positive_int, default=CODE_SIZE, help="size of the token codes")
    parser.add_argument("--epochs", type=positive_int, default=4)
    parser.add_argument("--held-out", type=positive_int, default=8, help="one conversation in so many (default: 8)")
    parser.add_argument("--examples", type=Path, help="file that keeps the rounds; read if it exists")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="torch threads (default: torch's choice)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    command = shlex.join(["sglang-dflow", "rescore", *(sys.argv[1:] if argv is None else argv)])
    try:
        return _run(args, command)
    except (ValueError, OSError) as error:
        print(f"sglang-dflow rescore: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace, command: str) -> int:
    torch.set_default_device(args.device)
    torch.manual_seed(args.seed)
    source = locate(args.drafter)
    make_empty(args.out)  # now, not after the work
    drafter = with_rescorer(Drafter.load(source), args.size, args.top_k, args.code_size)
    rescorer = drafter.rescorer
    assert rescorer is not None
    target = Target.load(locate(args.target), torch.bfloat16, drafter.config.target_layer_ids)
    train, held_out = (_take(examples, part) for examples, part in _examples(args, drafter, target))
    codes = token_codes(rescorer, target)
    started = time.monotonic()
    fit(rescorer, train, codes, args.epochs, args.seed)
    print(f"rescore: {len(train.bonus)} rounds, {args.epochs} epochs, {time.monotonic() - started:.0f} s")
    on_train, on_held_out = measure(rescorer, train, codes), measure(rescorer, held_out, codes)
    print(f"{'rounds behind a rejection':<28} {'n':>7} {'drafts':>7} {'rescored':>9} {'ratio':>7}")
    for name, found in (("fitted on", on_train), ("held out", on_held_out)):
        ratio = found.rescored / found.drafts
        print(f"{name:<28} {found.rounds:>7} {found.drafts:>7.3f} {found.rescored:>9.3f} {ratio:>7.4f}")
    attach_rescorer(source, args.out, rescorer)
    record = {
        "command": command,
        "out": str(args.out),
        "fitted_on": on_train._asdict(),
        "held_out": on_held_out._asdict(),
        "parameters": sum(p.numel() for p in rescorer.parameters()),
        "versions": versions() | {"git_commit": git_commit()},
        "machine": machine(),
    }
    print(json.dumps(record), flush=True)
    return 0


def _take(examples: Examples, part: torch.Tensor) -> Examples:
    return examples.of(torch.isin(examples.conversation, part))


def _examples(args: argparse.Namespace, drafter: Drafter, target: Target) -> list[tuple[Examples, torch.Tensor]]:
    """(all rounds, numbers of the conversations to fit on) and (all rounds, numbers of those held out)."""
    config = drafter.config
    features = config.hidden_size * len(config.target_layer_ids)
    samples = load_sequences(args.answers, features, target_layer_ids=config.target_layer_ids)
    order = torch.randperm(len(samples), generator=torch.Generator("cpu").manual_seed(args.seed), device="cpu").tolist()
    samples = [samples[i] for i in order[: args.conversations]]
    numbers = {id(sample): number for number, sample in enumerate(samples)}
    parts = [torch.tensor([numbers[id(s)] for s in part]) for part in split_held_out(samples, args.held_out)]
    if not all(len(part) for part in parts):
        raise ValueError(
            f"{len(samples)} conversations give {len(parts[0])} to fit on and {len(parts[1])} held out; expected some "
            "of both. Remedy: more --answers, or another --held-out."
        )
    made_with = {name: str(getattr(args, name)) for name in ("target", "drafter", "answers", "conversations", "seed")}
    if args.examples is not None and args.examples.is_file():
        examples = _read(args.examples, made_with)
    else:
        if args.examples is not None:
            args.examples.parent.mkdir(parents=True, exist_ok=True)
        examples = collect(drafter, target, samples)
        if args.examples is not None:
            save_file({name: tensor.cpu() for name, tensor in examples._asdict().items()}, args.examples, made_with)
    return [(examples, part) for part in parts]


def _read(path: Path, made_with: dict[str, str]) -> Examples:
    with safe_open(path, framework="pt") as handle:
        found = handle.metadata()
        if found != made_with:
            raise ValueError(
                f"{path} holds the rounds of {found}, expected those of {made_with}. Remedy: name another file, or "
                "remove it."
            )
        device = torch.get_default_device()
        return Examples(*(handle.get_tensor(name).to(device) for name in Examples._fields))


if __name__ == "__main__":
    raise SystemExit(main())
