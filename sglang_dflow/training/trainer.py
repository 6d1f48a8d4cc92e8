"""The trainer: frozen target, cached states, packed blocks, bf16 products with float32 master weights.

Owns the optimisation loop, its schedule and its checkpoints. One step drafts A blocks from each of S sequences;
context K/V are computed once per sequence and shared by its blocks. With method ``dflow`` a step adds relayed blocks
that follow the drafter's own rejected proposals (``L = L0 + L1``, rollout.py).

Several processes (``torchrun --nproc-per-node N -m sglang_dflow.training.trainer RECIPE``) train data-parallel: each
takes its own batches and gradients are averaged once a step. On a shared CPU that also beats one process with N
threads, which waits in every operation whenever one core is taken away.

Everything random in step n derives from (seed, n, rank), and a checkpoint holds model, optimiser, step and best tau,
so a resumed run continues exactly (with ``max_minutes``, up to the clock's share in the schedule).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sglang_dflow.relay.alignment import RelayRule, RelaySource
from sglang_dflow.training.dataset import (
    Batch,
    BlockLabels,
    Sample,
    collate,
    epoch_batches,
    labels_at,
    load_sequences,
    sample_anchors,
    split_held_out,
)
from sglang_dflow.training.drafter import Drafter, DrafterConfig
from sglang_dflow.training.evaluate import replay
from sglang_dflow.training.loss import block_loss, sampled_vocabulary, tau_estimate
from sglang_dflow.training.recipe import Recipe
from sglang_dflow.training.rollout import Relayed, make_rollout, next_round, relay_embeds, stack_relayed
from sglang_dflow.training.target import Target

Log = Callable[[str], None]


class StepResult(NamedTuple):
    """What one step reports."""

    losses: list[float]  # per round
    tau: float  # estimate from random anchors, round 0
    blocks: int


def learning_rate_factor(progress: float, step: int, warmup: int, floor: float) -> float:
    """Linear warm-up, then a cosine from 1 to ``floor`` over ``progress`` in 0..1."""
    cosine = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return min(1.0, (step + 1) / max(warmup, 1)) * cosine


def frequent_tokens(sequences: list[Sample], vocab_size: int, count: int) -> torch.Tensor:
    """Mask [V] of the ``count`` most frequent answer tokens."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sequence in sequences:
        counts += torch.bincount(sequence.tokens[sequence.prompt_len :], minlength=vocab_size)
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[counts.topk(min(count, vocab_size)).indices] = True
    return mask & (counts > 0)


class Trainer:
    """State of a run: drafter, optimiser, data, step."""

    def __init__(self, recipe: Recipe, target: Target, sequences: list[Sample], log: Log = print) -> None:
        self.recipe, self.target, self.log = recipe, target, log
        self.train_set, self.held_out = split_held_out(sequences, recipe.held_out)
        self.lengths = [len(sequence.tokens) for sequence in self.train_set]
        self.always = frequent_tokens(self.train_set, target.shape.vocab_size, recipe.frequent_tokens)
        self.drafter = self._make_drafter()
        relay = list(self.drafter.relay.parameters()) if self.drafter.relay is not None else []
        relay_ids = {id(p) for p in relay}
        matrices = [p for p in self.drafter.parameters() if p.ndim > 1 and id(p) not in relay_ids]
        gains = [p for p in self.drafter.parameters() if p.ndim <= 1 and id(p) not in relay_ids]
        groups = [
            {"params": matrices, "peak": recipe.learning_rate, "weight_decay": recipe.weight_decay},
            {"params": gains, "peak": recipe.learning_rate, "weight_decay": 0.0},
            {"params": relay, "peak": recipe.relay_learning_rate, "weight_decay": 0.0},
        ]
        betas = (recipe.betas[0], recipe.betas[1])
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1.0, betas=betas, fused=True)
        self.step, self.best_tau, self.elapsed = 0, 0.0, 0.0
        self.rank: int = dist.get_rank() if dist.is_initialized() else 0
        self.world: int = dist.get_world_size() if dist.is_initialized() else 1
        self.relayed: dict[int, Relayed] = {}
        self.rule = RelayRule.of(RelaySource(recipe.relay_source), shift_label=False)

    def _make_drafter(self) -> Drafter:
        recipe = self.recipe
        torch.manual_seed(recipe.seed)
        relay_size = recipe.relay_hidden_size if recipe.method == "dflow" else 0
        config = DrafterConfig.for_target(
            self.target,
            num_hidden_layers=recipe.num_layers,
            block_size=recipe.block_size,
            mask_token_id=recipe.mask_token_id,
            relay_source=recipe.relay_source,
            relay_hidden_size=relay_size,
            relay_activation=recipe.relay_activation,
        )
        drafter = Drafter(config)
        if recipe.init_from is None:
            drafter.init_from_target(self.target, recipe.source_layers)
        else:
            # A plain DFlash checkpoint starts the relay at zero; a DFlow one brings its own.
            missing, unexpected = drafter.load_state_dict(Drafter.load(recipe.init_from).state_dict(), strict=False)
            if unexpected or any(not name.startswith("relay.") for name in missing):
                raise ValueError(
                    f"{recipe.init_from} does not fit the recipe: missing {missing}, unexpected {unexpected}; expected "
                    "a drafter of the same sizes. Remedy: correct the recipe or leave init_from out."
                )
        return drafter

    def warm_start(self, path: Path) -> None:
        """Take weights and optimiser moments from another run's checkpoint; a new relay keeps its zero start."""
        state = torch.load(path, weights_only=True)
        missing, unexpected = self.drafter.load_state_dict(state["drafter"], strict=False)
        if unexpected or any(not name.startswith("relay.") for name in missing):
            raise ValueError(
                f"{path} does not fit the recipe: missing {missing}, unexpected {unexpected}; expected a drafter of "
                "the same sizes. Remedy: correct the recipe."
            )
        # Parameters are numbered group by group and the relay's group is the last one, so old numbers still fit.
        current = self.optimizer.state_dict()
        current["state"] = state["optimizer"]["state"]
        self.optimizer.load_state_dict(current)

    # --- one step ----------------------------------------------------------------------------------------

    def train_step(self) -> StepResult:
        """One optimiser step."""
        recipe = self.recipe
        generator = torch.Generator().manual_seed((recipe.seed << 32) + self.step * self.world + self.rank)
        # With rollouts, every other step adds relayed blocks, on the sequences that have some; the steps between
        # keep the drafter on all of the data, at the same number of blocks.
        relaying = bool(self.relayed) and self.step % 2 == 1
        batch = self._batch(recipe.sequences, relaying)
        count = recipe.anchors + (recipe.relayed_anchors if self.relayed and not relaying else 0)
        anchors = sample_anchors(batch, count, generator)  # [S, A]
        embeds = self.drafter.plain_embeds(self.target, batch.tokens.gather(1, anchors), self.target.dtype)
        labels = labels_at(batch, anchors, recipe.block_size)
        groups = [(embeds, anchors, labels)]
        if relaying:
            groups.append(self._relayed_blocks(batch, generator))
        losses, correct = self._losses(batch, groups, generator)
        self.optimizer.zero_grad(set_to_none=True)
        torch.stack(losses).sum().backward()
        self._average_gradients()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), recipe.grad_clip)
        self._set_learning_rate()
        self.optimizer.step()
        self.step += 1
        blocks = sum(int(group[1].numel()) for group in groups)
        return StepResult([float(loss.detach()) for loss in losses], correct, blocks)

    def _batch(self, size: int, relaying: bool) -> Batch:
        """The step's batch: the processes share one order and take turns."""
        pool = sorted(self.relayed) if relaying else list(range(len(self.train_set)))
        lengths = [self.lengths[index] for index in pool]
        turn = (self.step // 2 if self.relayed else self.step) * self.world + self.rank
        epoch, index = divmod(turn, len(epoch_batches(lengths, size, self.recipe.seed, 0)))
        chosen = epoch_batches(lengths, size, self.recipe.seed, epoch)[index]
        return collate(self.train_set, [pool[i] for i in chosen], self.recipe.block_size)

    def _average_gradients(self) -> None:
        """Mean gradient, and mean clock, of all processes: the schedule must be the same everywhere."""
        if self.world == 1:
            return
        gradients = [p.grad for p in self.drafter.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients] + [torch.tensor([self.elapsed])])
        dist.all_reduce(flat)
        flat /= self.world
        self.elapsed = float(flat[-1])
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()

    def _relayed_blocks(
        self, batch: Batch, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, BlockLabels]:
        """Relayed blocks of the batch's sequences: input rows, anchors, labels."""
        items = [self.relayed[index] for index in batch.indices]
        relayed, real = stack_relayed(items, self.recipe.relayed_anchors, generator)
        anchors = torch.where(real, relayed.anchors, batch.prompt_lens[:, None])
        plain = self.drafter.plain_embeds(self.target, batch.tokens.gather(1, anchors), self.target.dtype)
        labels = labels_at(batch, anchors, self.recipe.block_size)
        labels = BlockLabels(labels.tokens, labels.valid & real[..., None])
        return relay_embeds(self.drafter, self.target, plain, relayed), anchors, labels

    def _losses(
        self, batch: Batch, groups: list[tuple[torch.Tensor, torch.Tensor, BlockLabels]], generator: torch.Generator
    ) -> tuple[list[torch.Tensor], float]:
        """Loss of every round, all rounds packed into one drafter forward on one context."""
        recipe = self.recipe
        context = self.drafter.context(batch.captured.to(self.target.dtype))
        embeds = torch.cat([group[0] for group in groups], dim=1)
        anchors = torch.cat([group[1] for group in groups], dim=1)
        hidden = self.drafter(embeds, anchors, context)  # [S, A0 + A1, B, H]
        labels = torch.cat([group[2].tokens[group[2].valid] for group in groups])
        vocabulary = sampled_vocabulary(self.target.head, self.always, labels, recipe.negatives, generator)
        losses, start, tau = [], 0, 0.0
        for number, (_, rows, wanted) in enumerate(groups):
            part = hidden[:, start : start + rows.shape[1]].flatten(0, 1)
            start += rows.shape[1]
            result = block_loss(part, wanted.tokens.flatten(0, 1), wanted.valid.flatten(0, 1), vocabulary, recipe.gamma)
            losses.append(result.loss)
            if number == 0:
                tau = tau_estimate(result.correct, result.valid)
        return losses, tau

    def progress(self) -> float:
        """Share of the run that is done, 0..1, by steps or by the clock, whichever is further."""
        by_clock = self.elapsed / (60 * self.recipe.max_minutes) if self.recipe.max_minutes else 0.0
        return max(self.step / self.recipe.steps, by_clock)

    def _set_learning_rate(self) -> None:
        recipe = self.recipe
        factor = learning_rate_factor(self.progress(), self.step, recipe.warmup_steps, recipe.min_learning_rate_ratio)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor

    # --- rollouts ----------------------------------------------------------------------------------------

    def refresh_rollouts(self) -> None:
        """Make rollouts of a random subset of the training set with the drafter as it is."""
        recipe = self.recipe
        generator = torch.Generator().manual_seed((recipe.seed << 32) + 7919 * (self.step + 1))
        chosen = torch.randperm(len(self.train_set), generator=generator)[: recipe.rollout_sequences].tolist()
        chosen = chosen[self.rank :: self.world]
        started, relayed = time.monotonic(), {}
        block_bytes = recipe.block_size * self.target.shape.hidden_size * len(recipe.target_layer_ids) * 2
        size = len(chosen) * recipe.rollout_anchors * block_bytes / 1e9
        self.log(f"rollout: {len(chosen)} sequences x {recipe.rollout_anchors} blocks, at most {size:.1f} GB in memory")
        accept, count = 0, 0
        for number, index in enumerate(chosen):
            sample = self.train_set[index]
            rollout = make_rollout(self.drafter, self.target, sample, recipe.rollout_anchors, generator)
            accept, count = accept + int(rollout.accept_len.sum()), count + len(rollout.accept_len)
            item = next_round(rollout, sample.tokens, self.rule, recipe.block_size)
            if len(item.anchors):
                relayed[index] = item
            if number % 200 == 199:
                rate = count / (time.monotonic() - started)
                self.log(f"rollout: {number + 1}/{len(chosen)}, {rate:.0f} blocks/s, tau {1 + accept / count:.3f}")
        self.relayed = self._share_rollouts(relayed)

    def _share_rollouts(self, own: dict[int, Relayed]) -> dict[int, Relayed]:
        """The rollouts of all processes, exchanged through files in the run directory."""
        if self.world == 1:
            return own
        folder = Path(self.recipe.run_dir)
        torch.save({index: tuple(item) for index, item in own.items()}, folder / f"rollouts.{self.rank}.pt")
        dist.barrier()
        everything = dict(own)
        for rank in range(self.world):
            if rank != self.rank:
                loaded = torch.load(folder / f"rollouts.{rank}.pt", weights_only=True, mmap=True)
                everything |= {index: Relayed(*fields) for index, fields in loaded.items()}
        return everything

    # --- running -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end of the schedule, with logs, evaluations and checkpoints."""
        recipe = self.recipe
        if recipe.method == "dflow" and not self.relayed:
            self.refresh_rollouts()
        window: list[StepResult] = []
        began = mark = time.monotonic()
        while self.progress() < 1.0:
            self.elapsed += time.monotonic() - began
            began = time.monotonic()
            window.append(self.train_step())
            if self.step % recipe.log_steps == 0:
                self._report(window, time.monotonic() - mark)
                window, mark = [], time.monotonic()
            if recipe.refresh_steps and self.step % recipe.refresh_steps == 0 and recipe.method == "dflow":
                self.refresh_rollouts()
                mark = time.monotonic()
            if self.step % recipe.eval_steps == 0:
                self.evaluate()
                began = mark = time.monotonic()  # evaluation takes nothing from the schedule
            if self.step % recipe.checkpoint_steps == 0:
                self.save_checkpoint()
        self.evaluate()
        self.save_checkpoint()

    def _report(self, window: list[StepResult], seconds: float) -> None:
        most = max(len(result.losses) for result in window)
        by_round = [[result.losses[i] for result in window if i < len(result.losses)] for i in range(most)]
        rounds = [sum(values) / len(values) for values in by_round]
        blocks = sum(result.blocks for result in window) * self.world
        tau = sum(result.tau for result in window) / len(window)
        losses = " ".join(f"L{i} {loss:.3f}" for i, loss in enumerate(rounds))
        rate = self.optimizer.param_groups[0]["lr"]
        self.log(
            f"step {self.step} {losses} tau~{tau:.3f} lr {rate:.2e} {blocks / seconds:.0f} blocks/s "
            f"{self.elapsed / 60:.1f} min"
        )
        if self.rank:
            return
        record = {"step": self.step, "losses": rounds, "tau": tau, "blocks_s": blocks / seconds, "lr": rate}
        with (Path(self.recipe.run_dir) / "log.jsonl").open("a") as out:
            out.write(json.dumps(record) + "\n")

    def evaluate(self) -> float:
        """Held-out tau with masks only; keeps the best drafter in ``run_dir/best``."""
        if self.rank:
            return 0.0
        result = replay(self.drafter, self.target, self.held_out[:24])
        self.log(f"step {self.step} held-out tau {result.tau:.3f} (n={result.rounds} rounds, masks only)")
        if result.tau > self.best_tau:
            self.best_tau = result.tau
            self.drafter.save(Path(self.recipe.run_dir) / "best")
        return result.tau

    def save_checkpoint(self) -> None:
        """Write the whole state, atomically."""
        if self.rank:
            return
        path = Path(self.recipe.run_dir) / "checkpoint.pt"
        state = {
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "best_tau": self.best_tau,
            "elapsed": self.elapsed,
            "relayed": {index: tuple(item) for index, item in self.relayed.items()},
        }
        partial = path.with_suffix(".part")
        torch.save(state, partial)
        partial.replace(path)
        self.drafter.save(Path(self.recipe.run_dir) / "last")

    def resume(self) -> bool:
        """Continue from ``run_dir/checkpoint.pt`` if it is there."""
        path = Path(self.recipe.run_dir) / "checkpoint.pt"
        if not path.is_file():
            return False
        state = torch.load(path, weights_only=True)
        self.drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.best_tau, self.elapsed = state["step"], state["best_tau"], state["elapsed"]
        self.relayed = {index: Relayed(*fields) for index, fields in state["relayed"].items()}
        self.log(f"resumed at step {self.step}")
        return True


def main(argv: list[str] | None = None) -> int:
    """``sglang-dflow train RECIPE.yaml``: train a drafter."""
    parser = argparse.ArgumentParser(prog="sglang-dflow train", description=main.__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="override a recipe field")
    args = parser.parse_args(argv)
    import yaml

    fields: dict[str, Any] = yaml.safe_load(args.recipe.read_text())
    for item in args.set:
        name, _, value = item.partition("=")
        fields[name] = yaml.safe_load(value)
    recipe = Recipe.from_dict(fields, str(args.recipe))
    torch.set_num_threads(recipe.threads)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    rank = int(os.environ.get("RANK", "0"))
    run_dir = Path(recipe.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "recipe.yaml").write_text(yaml.safe_dump(fields))
    target = Target.load(recipe.target, torch.bfloat16, recipe.target_layer_ids)
    features = target.shape.hidden_size * len(recipe.target_layer_ids)
    sequences = load_sequences(recipe.answers, features)

    def log(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    log(f"train: {len(sequences)} sequences, {sum(len(s.tokens) - s.prompt_len for s in sequences)} answer tokens")
    trainer = Trainer(recipe, target, sequences, log)
    if not trainer.resume() and recipe.warm_start is not None:
        trainer.warm_start(Path(recipe.warm_start))
    trainer.run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
