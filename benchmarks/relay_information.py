"""What could a relay know that the drafter does not? Probes on rounds that follow a rejection.

    python -m benchmarks.relay_information --run runs/lab/narrow/table/dflow-stale.0

How much could any relay gain on this drafter and this text? Reads the first rollouts of a training run (method dflow,
with the stale token, from an existing drafter): blocks of the run's conversations that the starting drafter drafted
from masks and the target verified. That drafter, frozen, drafts the blocks behind them, from masks again. A small MLP
then corrects its final hidden states under the frozen head, ``hidden + MLP([hidden; E(b); inputs])``, with different
inputs: nothing new (the control, since more training alone helps), the paper's (``h``, ``E(d)``), the target's stale
top-1 (``E(s)``), both, and both of the neighbouring rows as well. Trained on 4/5 of the conversations, reported on the
rest. What the inputs add over the control is what the verification knows and the drafter does not, read at the place
where it is easiest to use.

Output: one table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from sglang_dflow.arguments import positive_int
from sglang_dflow.provenance import git_commit, machine, versions
from sglang_dflow.training.dataset import collate, labels_at, load_sequences, split_held_out
from sglang_dflow.training.drafter import Drafter
from sglang_dflow.training.loss import block_loss, full_vocabulary, sampled_vocabulary
from sglang_dflow.training.recipe import Recipe
from sglang_dflow.training.rollout_store import RolloutStore
from sglang_dflow.training.target import Target

PROBES: dict[str, tuple[str, ...]] = {
    "control": (),
    "h": ("h", "rejected"),
    "stale": ("stale", "rejected"),
    "h + stale": ("h", "stale", "rejected"),
    "h + stale, neighbours": ("h", "stale", "rejected", "h before", "h behind", "stale before", "stale behind"),
}


class Rounds(NamedTuple):
    """Blocks that follow a rejection, N of them; R = B - 1 mask rows, H hidden."""

    hidden: torch.Tensor  # [N, R, H] bf16, the drafter's final hidden states, masks only
    projected: torch.Tensor  # [N, R, H] bf16, relayed states h
    mask: torch.Tensor  # [N, R] rows that have a relay
    stale: torch.Tensor  # [N, R] the target's top-1 at the source rows
    bonus: torch.Tensor  # [N]
    rejected: torch.Tensor  # [N]
    labels: torch.Tensor  # [N, R]
    valid: torch.Tensor  # [N, R]

    def of(self, chosen: torch.Tensor) -> Rounds:
        """The chosen blocks."""
        return Rounds(*(field[chosen] for field in self))


def rounds_of_run(recipe: Recipe, drafter: Drafter, target: Target) -> tuple[Rounds, torch.Tensor]:
    """Rounds behind a rejection, and the number [N] of the conversation that each is from."""
    block, config = drafter.config.block_size, drafter.config
    features = config.hidden_size * len(config.target_layer_ids)
    sequences = load_sequences(recipe.answers, features, target_layer_ids=config.target_layer_ids)
    samples, _ = split_held_out(sequences, recipe.held_out)
    store = RolloutStore(Path(recipe.run_dir) / "rollouts" / "0")
    parts: list[Rounds] = []
    owners: list[torch.Tensor] = []
    for number in store.sequences:
        item = store.get(number, 0)
        assert item is not None
        batch = collate(samples, [number], block, target)
        with torch.no_grad():
            context = drafter.context(batch.captured.to(target.dtype))
            embeds = drafter.plain_embeds(target, item.bonus[None], target.dtype)
            hidden = drafter(embeds, item.anchors[None], context)[0, :, 1:]
            projected = drafter.project(item.states[:, 1:].to(target.dtype))
        labels = labels_at(batch, item.anchors[None], block)
        parts.append(
            Rounds(hidden, projected, item.mask[:, 1:], item.stale[:, 1:], item.bonus, item.rejected,
                   labels.tokens[0, :, 1:], labels.valid[0, :, 1:])
        )  # fmt: skip
        owners.append(torch.full((len(item.anchors),), number))
    return Rounds(*(torch.cat(fields) for fields in zip(*parts))), torch.cat(owners)


class Probe(nn.Module):
    """``hidden + MLP([hidden; E(b); row; inputs])``, zero at the start."""

    def __init__(self, target: Target, inputs: tuple[str, ...], rows: int, width: int) -> None:
        super().__init__()
        size = target.shape.hidden_size
        self.target, self.inputs = target, inputs
        self.row = nn.Parameter(torch.zeros(rows, width))
        self.first = nn.Linear((2 + len(inputs)) * size, width)
        self.second = nn.Linear(width, size)
        nn.init.zeros_(self.second.weight)
        nn.init.zeros_(self.second.bias)

    def forward(self, rounds: Rounds) -> torch.Tensor:
        """Corrected hidden states [N, R, H]."""
        values = [rounds.hidden, self._embed(rounds.bonus)[:, None].expand_as(rounds.hidden)]
        values += [self._input(name, rounds) for name in self.inputs]
        features = torch.cat([_unit(value) for value in values], dim=-1)
        with torch.autocast("cpu", torch.bfloat16):
            change = self.second(F.silu(self.first(features) + self.row))
        return rounds.hidden + change.to(rounds.hidden.dtype)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.target.embed(tokens).to(torch.bfloat16)

    def _input(self, name: str, rounds: Rounds) -> torch.Tensor:
        kind, _, neighbour = name.partition(" ")
        if kind == "rejected":
            value = self._embed(rounds.rejected)[:, None].expand_as(rounds.hidden)
            return value * rounds.mask.any(-1)[:, None, None]
        value = rounds.projected if kind == "h" else self._embed(rounds.stale)
        value = value * rounds.mask[..., None]
        if neighbour:
            value = F.pad(value, (0, 0, 1, 0))[:, :-1] if neighbour == "before" else F.pad(value, (0, 0, 0, 1))[:, 1:]
        return value


def _unit(value: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(value, value.shape[-1:], eps=1e-6)


class Result(NamedTuple):
    """A probe on conversations that it was not trained on."""

    loss: float  # nats, decayed over rows
    tau: float  # 1 + accepted drafts of these rounds
    right: list[float]  # by row


def _hidden_rows(corrected: torch.Tensor) -> torch.Tensor:
    return F.pad(corrected, (0, 0, 1, 0))  # block_loss wants the anchor's row, too


def evaluate(probe: Probe, rounds: Rounds, gamma: float) -> Result:
    """Loss and acceptance over the whole vocabulary."""
    vocabulary = full_vocabulary(probe.target.head)
    losses, correct = [], []
    with torch.no_grad():
        for chosen in torch.arange(len(rounds.bonus)).split(512):
            part = rounds.of(chosen)
            hidden = _hidden_rows(probe(part))
            result = block_loss(hidden, F.pad(part.labels, (1, 0)), F.pad(part.valid, (1, 0)), vocabulary, gamma)
            losses.append(float(result.loss) * len(chosen))
            correct.append(result.correct & part.valid)
    right = torch.cat(correct)
    rows = (right.sum(0) / rounds.valid.sum(0)).tolist()
    return Result(sum(losses) / len(rounds.bonus), _tau(right), rows)


def train(probe: Probe, rounds: Rounds, epochs: int, batch: int, gamma: float, seed: int) -> None:
    """Fit the probe."""
    generator = torch.Generator().manual_seed(seed)
    always = torch.zeros(probe.target.shape.vocab_size, dtype=torch.bool)
    always[torch.bincount(rounds.labels.flatten(), minlength=len(always)).topk(5000).indices] = True
    optimizer = torch.optim.AdamW(probe.parameters(), lr=1e-3, weight_decay=0.05)
    steps = epochs * (len(rounds.bonus) // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for chosen in torch.randperm(len(rounds.bonus), generator=generator).split(batch):
            if len(chosen) < batch:
                continue
            part = rounds.of(chosen)
            vocabulary = sampled_vocabulary(probe.target.head, always, part.labels[part.valid], 1000, generator)
            hidden = _hidden_rows(probe(part))
            result = block_loss(hidden, F.pad(part.labels, (1, 0)), F.pad(part.valid, (1, 0)), vocabulary, gamma)
            optimizer.zero_grad()
            result.loss.backward()
            optimizer.step()
            schedule.step()


def guesses(target: Target, rounds: Rounds) -> dict[str, torch.Tensor]:
    """Where [N, R] a guess is right: the stale token of the row and of its neighbours, the drafter, any of several."""
    drafted = torch.cat([target.logits(part.flatten(0, 1)).argmax(-1) for part in rounds.hidden.split(256)])
    drafter = (drafted.view_as(rounds.labels) == rounds.labels) & rounds.valid
    known = torch.where(rounds.mask, rounds.stale, -1)
    before, behind = F.pad(known, (1, 0), value=-1)[:, :-1], F.pad(known, (0, 1), value=-1)[:, 1:]
    own, before, behind = ((tokens == rounds.labels) & rounds.valid for tokens in (known, before, behind))
    return {
        "stale token": own,
        "stale token of the row before": before,
        "stale token of the row behind": behind,
        "drafter": drafter,
        "drafter or stale token": drafter | own,
        "any of these": drafter | own | before | behind,
    }


def _tau(right: torch.Tensor) -> float:
    return 1.0 + float(right.long().cumprod(-1).sum(-1).float().mean())


def main(argv: list[str] | None = None) -> int:
    """Collect the rounds, fit the probes, print what they know."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run directory of `sglang-dflow train`, method dflow")
    parser.add_argument("--epochs", type=positive_int, default=3)
    parser.add_argument("--width", type=positive_int, default=768)
    parser.add_argument("--seeds", type=positive_int, default=2)
    parser.add_argument("--probes", nargs="*", default=list(PROBES), choices=list(PROBES))
    args = parser.parse_args(argv)
    recipe = Recipe.load(args.run / "recipe.yaml")
    if not (recipe.has_relay and recipe.relay_stale_token and recipe.init_from):
        parser.error(
            f"{args.run} is of method {recipe.method}, stale token {recipe.relay_stale_token}, init_from "
            f"{recipe.init_from}; expected a dflow run with relay_stale_token from an existing drafter (init_from)"
        )
    drafter = Drafter.load(recipe.init_from)
    target = Target.load(recipe.target, torch.bfloat16, drafter.config.target_layer_ids)
    rounds, owners = rounds_of_run(recipe, drafter, target)
    held_out = owners % 5 == 0
    train_set, test_set = rounds.of((~held_out).nonzero()[:, 0]), rounds.of(held_out.nonzero()[:, 0])
    print(f"{len(train_set.bonus)} training and {len(test_set.bonus)} test blocks, "
          f"{len(owners.unique())} conversations", file=sys.stderr)  # fmt: skip
    found_right, valid = guesses(target, rounds), rounds.valid.sum(0)
    by_row = {name: (right.sum(0) / valid).tolist() for name, right in found_right.items()}
    print("| right, by row | " + " | ".join(str(t + 1) for t in range(len(valid))) + " | tau, the best guess known |")
    print("|---" * (len(valid) + 2) + "|")
    for name, values in by_row.items():
        print(f"| {name} | " + " | ".join(f"{v:.3f}" for v in values) + f" | {_tau(found_right[name]):.3f} |")
    print("\n| probe | loss | tau of these rounds | / control | right, by row |\n|---|---|---|---|---|", flush=True)
    results: dict[str, list[Result]] = {name: [] for name in args.probes}
    for name in args.probes:
        for seed in range(args.seeds):
            torch.manual_seed(seed)
            probe = Probe(target, PROBES[name], test_set.labels.shape[1], args.width)
            train(probe, train_set, args.epochs, 256, recipe.gamma, seed)
            results[name].append(evaluate(probe, test_set, recipe.gamma))
        ratios = [r.tau / c.tau for r, c in zip(results[name], results.get("control", results[name]))]
        loss, taus = [r.loss for r in results[name]], [r.tau for r in results[name]]
        rows = " ".join(f"{sum(column) / len(column):.3f}"[1:] for column in zip(*(r.right for r in results[name])))
        print(f"| {name} | {_spread(loss)} | {_spread(taus)} | {_spread(ratios)} | {rows} |", flush=True)
    record = {
        "command": " ".join(["python -m benchmarks.relay_information", *(argv or sys.argv[1:])]),
        "versions": versions() | {"git_commit": git_commit()},
        "machine": machine(),
        "blocks": {"train": len(train_set.bonus), "test": len(test_set.bonus)},
        "guesses": by_row,
        "probes": {name: [r._asdict() for r in found] for name, found in results.items()},
    }
    print(json.dumps(record))
    return 0


def _spread(values: list[float]) -> str:
    mean = sum(values) / len(values)
    return f"{mean:.3f} ({min(values):.3f}..{max(values):.3f})"


if __name__ == "__main__":
    raise SystemExit(main())
