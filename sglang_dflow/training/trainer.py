"""The trainer: frozen target, cached states, packed blocks, bf16 products with float32 master weights.

Owns the optimisation loop, its schedule and its checkpoints. One step drafts A blocks on each of S sequences;
context K/V are computed once per sequence and shared by its blocks. Methods with rounds add, every other step, blocks
that follow the drafter's own rejected proposals (``L = L0 + .. + Lk``, rollout.py), with the relay or, for
self-conditioning, from masks; the steps between draw as many blocks from masks on all of the data.

Several processes (``torchrun --nproc-per-node N -m sglang_dflow.training.trainer RECIPE``) train data-parallel: each
takes its own batches and gradients are averaged once a step. On a shared CPU that also beats one process with N
threads, which waits in every operation whenever one core is taken away.

Everything random in step n derives from (seed, n, rank), and a checkpoint holds model, optimiser, step and best tau, so
a resumed run continues exactly (with ``max_minutes``, up to the clock's share in the schedule).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sglang_dflow.provenance import git_commit, machine, versions
from sglang_dflow.relay.alignment import RelayRule, RelaySource
from sglang_dflow.relay.modulation import RelayModulation
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
from sglang_dflow.training.domino import domino_loss
from sglang_dflow.training.drafter import Drafter, DrafterConfig
from sglang_dflow.training.loss import Vocabulary, block_loss, sampled_vocabulary, tau_estimate
from sglang_dflow.training.plot import plot_run
from sglang_dflow.training.recipe import Recipe
from sglang_dflow.training.replay import replay
from sglang_dflow.training.rollout import Relayed, make_rollout, relay_embeds, stack_relayed
from sglang_dflow.training.rollout_store import RolloutStore, drop_older, finished_sequences, write_rollouts
from sglang_dflow.training.target import Target

Log = Callable[[str], None]


class StepResult(NamedTuple):
    """What one step reports."""

    losses: list[float]  # per round
    tau: float  # estimate from random anchors, round 0; with relay_only from the first relayed round
    blocks: int


class _Blocks(NamedTuple):
    """The blocks of one round in a step."""

    embeds: torch.Tensor  # [S, A, B, H]
    anchors: torch.Tensor  # [S, A]
    labels: BlockLabels  # [S, A, B]


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


@torch.no_grad()
def scale_relay_inputs(relay: RelayModulation, hidden_rms: float, embed_rms: float, generator: torch.Generator) -> None:
    """Draw the relay's first layer so that every input moves it equally, whatever its scale.

    Both are small (the trainer logs how small); the default initialisation would leave them in the activation's linear
    range.
    """
    weight, size = relay.relay_mlp[0].weight, relay.hidden_size
    inputs = weight.shape[1] // size
    for index in range(inputs):
        rms = hidden_rms if index == 2 else embed_rms  # [E(b); E(d); h; E(s)]
        part = weight[:, index * size : (index + 1) * size]
        draw = torch.randn(part.shape, generator=generator, device="cpu").to(part)
        part.copy_(draw / (rms * math.sqrt(inputs * size)))


class Trainer:
    """State of a run: drafter, optimiser, data, step."""

    def __init__(self, recipe: Recipe, target: Target, sequences: list[Sample], log: Log = print) -> None:
        self.recipe, self.target, self.log = recipe, target, log
        self.run_dir = Path(recipe.run_dir)
        self.train_set, self.held_out = split_held_out(sequences, recipe.held_out)
        self.lengths = [len(sequence.tokens) for sequence in self.train_set]
        self.always = frequent_tokens(self.train_set, target.shape.vocab_size, recipe.frequent_tokens)
        self.drafter = self._make_drafter()
        self.optimizer = self._make_optimizer()
        self.step, self.best_tau, self.elapsed = 0, 0.0, 0.0
        self.rank: int = dist.get_rank() if dist.is_initialized() else 0
        self.world: int = dist.get_world_size() if dist.is_initialized() else 1
        self.rollouts: RolloutStore | None = None
        self.rule = RelayRule.of(RelaySource(recipe.relay_source), shift_label=self.drafter.config.shift_label)

    def _make_drafter(self) -> Drafter:
        recipe = self.recipe
        torch.manual_seed(recipe.seed)
        head: dict[str, Any] = {}
        if recipe.has_domino:
            head = {"projector_type": "domino", "gru_hidden_dim": recipe.gru_hidden_dim, "emb_dim": recipe.emb_dim}
            head["shift_label"] = recipe.shift_label
        config = DrafterConfig.for_target(
            self.target,
            num_hidden_layers=recipe.num_layers,
            block_size=recipe.block_size,
            mask_token_id=recipe.mask_token_id,
            relay_source=recipe.relay_source,
            relay_hidden_size=recipe.relay_hidden_size if recipe.has_relay else 0,
            relay_activation=recipe.relay_activation,
            relay_stale_token=recipe.relay_stale_token and recipe.has_relay,
            **head,
        )
        drafter = Drafter(config)
        if recipe.init_from is None:
            drafter.init_from_target(self.target, recipe.source_layers)
            new = [name for name, _ in drafter.named_parameters()]
        else:
            new = load_partly(drafter, Drafter.load(recipe.init_from).state_dict(), recipe.init_from)
        if drafter.relay is not None and any(name.startswith("relay.relay_mlp.") for name in new):
            self._scale_relay(drafter)
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_(not recipe.relay_only or name.startswith("relay."))
        return drafter

    def _scale_relay(self, drafter: Drafter) -> None:
        assert drafter.relay is not None
        sample = collate(self.train_set, [0], self.recipe.block_size, self.target)
        with torch.no_grad():
            hidden = drafter.project(sample.captured.to(self.target.dtype)).float()
        embed = self.target.embed(sample.tokens).float()
        generator = torch.Generator("cpu").manual_seed(self.recipe.seed)
        hidden_rms, embed_rms = (float(t.pow(2).mean().sqrt()) for t in (hidden, embed))
        self.log(f"relay: inputs scaled, rms of projected states {hidden_rms:.2f}, of token embeddings {embed_rms:.2f}")
        scale_relay_inputs(drafter.relay, hidden_rms, embed_rms, generator)

    def _make_optimizer(self) -> torch.optim.AdamW:
        recipe, parameters = self.recipe, dict(self.drafter.named_parameters())
        peaks = {"matrices": recipe.learning_rate, "gains": recipe.learning_rate, "relay": recipe.relay_learning_rate}
        groups = [
            {
                "params": [parameters[name] for name in names],
                "peak": peaks[group],
                "weight_decay": recipe.weight_decay if group == "matrices" else 0.0,
            }
            for group, names in optimizer_groups(parameters).items()
            if names
        ]
        return torch.optim.AdamW(groups, lr=1.0, betas=(recipe.betas[0], recipe.betas[1]), fused=True)

    def warm_start(self, path: Path) -> None:
        """Take weights and optimiser moments from another run's checkpoint; a new relay or head starts afresh."""
        state = torch.load(path, weights_only=True)
        load_partly(self.drafter, state["drafter"], str(path))
        old, new = (
            optimizer_numbers(parameters) for parameters in (state["drafter"], dict(self.drafter.named_parameters()))
        )
        moments = state["optimizer"]["state"]
        current = self.optimizer.state_dict()
        current["state"] = {new[name]: moments[number] for name, number in old.items() if number in moments}
        self.optimizer.load_state_dict(current)

    # --- one step ----------------------------------------------------------------------------------------

    def train_step(self) -> StepResult:
        """One optimiser step."""
        recipe = self.recipe
        generator = torch.Generator("cpu").manual_seed((recipe.seed << 32) + self.step * self.world + self.rank)
        relaying = self.rollouts is not None and (recipe.relay_only or self.step % 2 == 1)
        batch = self._batch(recipe.sequences, relaying)
        extra = recipe.rounds * recipe.relayed_anchors if self.rollouts is not None and not relaying else 0
        groups = []
        if not recipe.relay_only:
            groups.append(self._masked_blocks(batch, sample_anchors(batch, recipe.anchors + extra, generator)))
        if relaying:
            groups += [self._round_blocks(batch, number, generator) for number in range(recipe.rounds)]
        losses, tau = self._losses(batch, groups, generator)
        self.optimizer.zero_grad(set_to_none=True)
        torch.stack(losses).sum().backward()
        self._average_gradients(relaying)
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), recipe.grad_clip)
        self._set_learning_rate()
        self.optimizer.step()
        self.step += 1
        return StepResult([float(loss.detach()) for loss in losses], tau, sum(g.anchors.numel() for g in groups))

    def _batch(self, size: int, relaying: bool) -> Batch:
        """The step's batch: the processes share one order and take turns."""
        pool = self.rollouts.sequences if relaying and self.rollouts is not None else range(len(self.train_set))
        lengths = [self.lengths[index] for index in pool]
        by_turns = self.rollouts is not None and not self.recipe.relay_only
        turn = (self.step // 2 if by_turns else self.step) * self.world + self.rank
        epoch, index = divmod(turn, len(epoch_batches(lengths, size, self.recipe.seed, 0)))
        chosen = epoch_batches(lengths, size, self.recipe.seed, epoch)[index]
        return collate(self.train_set, [pool[i] for i in chosen], self.recipe.block_size, self.target)

    def _average_gradients(self, relaying: bool) -> None:
        """Mean gradient, and mean clock, of all processes: the schedule must be the same everywhere.

        In a step without relayed blocks the relay is not averaged and not stepped, as with one process.
        """
        if self.world == 1:
            return
        gradients = []
        for name, parameter in self.drafter.named_parameters():
            if parameter.requires_grad and (relaying or not name.startswith("relay.")):
                if parameter.grad is None:  # no relayed block in this process's batch, but one elsewhere
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        flat = torch.cat([g.flatten() for g in gradients] + [gradients[0].new_tensor([self.elapsed])])
        dist.all_reduce(flat)
        flat /= self.world
        self.elapsed = float(flat[-1])
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()

    def _masked_blocks(self, batch: Batch, anchors: torch.Tensor) -> _Blocks:
        """Blocks drafted from masks at anchors [S, A]."""
        embeds = self.drafter.plain_embeds(self.target, batch.tokens.gather(1, anchors), self.target.dtype)
        return _Blocks(embeds, anchors, labels_at(batch, anchors, self.recipe.block_size))

    def _round_blocks(self, batch: Batch, number: int, generator: torch.Generator) -> _Blocks:
        """Blocks of round ``number + 1`` of the batch's sequences; padding has no valid label."""
        assert self.rollouts is not None
        recipe, items = self.recipe, [self.rollouts.get(index, number) for index in batch.indices]
        if not any(item is not None for item in items):
            blocks = self._masked_blocks(batch, batch.prompt_lens[:, None])
            return blocks._replace(labels=blocks.labels._replace(valid=torch.zeros_like(blocks.labels.valid)))
        relayed, real = stack_relayed(items, recipe.relayed_anchors, generator)
        relayed, real = Relayed(*(f.to(batch.tokens.device) for f in relayed)), real.to(batch.tokens.device)
        blocks = self._masked_blocks(batch, torch.where(real, relayed.anchors, batch.prompt_lens[:, None]))
        valid = blocks.labels.valid & real[..., None]
        embeds = blocks.embeds
        if recipe.has_relay:
            embeds = relay_embeds(
                self.drafter, self.target, embeds, relayed, not recipe.relay_fc_gradient, recipe.relay_without
            )
        return _Blocks(embeds, blocks.anchors, blocks.labels._replace(valid=valid))

    def _losses(
        self, batch: Batch, groups: list[_Blocks], generator: torch.Generator
    ) -> tuple[list[torch.Tensor], float]:
        """Loss of every group, all packed into one drafter forward on one context; tau of the first group."""
        context = self.drafter.context(batch.captured.to(self.target.dtype))
        embeds = torch.cat([group.embeds for group in groups], dim=1)
        hidden = self.drafter(embeds, torch.cat([group.anchors for group in groups], dim=1), context)
        used = torch.cat([group.labels.tokens[group.labels.valid] for group in groups])
        vocabulary = sampled_vocabulary(self.target.head, self.always, used, self.recipe.negatives, generator)
        parts = hidden.split([group.anchors.shape[1] for group in groups], dim=1)  # [S, A, B, H] each
        results = [self._round_loss(part, group.labels, vocabulary) for part, group in zip(parts, groups)]
        return [loss for loss, _ in results], results[0][1]

    def _round_loss(
        self, hidden: torch.Tensor, labels: BlockLabels, vocabulary: Vocabulary
    ) -> tuple[torch.Tensor, float]:
        recipe, head = self.recipe, self.drafter.domino
        rows, tokens, valid = (t.flatten(0, 1) for t in (hidden, *labels))
        if head is None:
            plain = block_loss(rows, tokens, valid, vocabulary, recipe.gamma)
            return plain.loss, tau_estimate(plain.correct, plain.valid)
        embedding, base = self.target.embedding, recipe.domino_base_weight
        domino = domino_loss(head, rows, tokens, valid, embedding, vocabulary, recipe.gamma, base)
        return domino.loss, tau_estimate(domino.correct, domino.valid)

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
        """Make rollouts of a random subset of the training set with the drafter as it is, or go on making them."""
        recipe, folder = self.recipe, self.run_dir / "rollouts" / str(self.step)
        made_with = {"recipe": json.dumps(asdict(recipe), sort_keys=True), "processes": str(self.world)}
        seed = (recipe.seed << 32) + 7919 * (self.step + 1)
        order = torch.randperm(len(self.train_set), generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
        own = order[: recipe.rollout_sequences].tolist()[self.rank :: self.world]
        if done := finished_sequences(folder, self.rank, self.world, made_with):
            own = own[own.index(done[-1]) + 1 :]
            self.log(f"rollout: goes on behind {len(done)} sequences of an interrupted run")
        block_bytes = recipe.block_size * self.target.shape.hidden_size * len(recipe.target_layer_ids) * 2
        blocks = min(recipe.rollout_sequences, len(self.train_set)) * recipe.rollout_anchors * recipe.rounds
        self.log(f"rollout: up to {blocks} blocks, {blocks * block_bytes / 1e9:.1f} GB, into {folder}")
        write_rollouts(folder, self.rank, self._rollouts(own, seed), recipe.rounds, made_with)
        self._open_rollouts(folder)

    def _open_rollouts(self, folder: Path) -> None:
        if self.world > 1:
            dist.barrier()
        self.rollouts = RolloutStore(folder)

    def _rollouts(self, own: list[int], seed: int) -> Iterator[tuple[int, list[Relayed]]]:
        recipe = self.recipe
        started, count = time.monotonic(), [0] * recipe.rounds
        for number, index in enumerate(own):
            chain = make_rollout(
                self.drafter, self.target, self.train_set[index], recipe.rollout_anchors, recipe.rounds, self.rule,
                torch.Generator("cpu").manual_seed(seed + index + 1),
                relay=recipe.has_relay, teacher_forced=not recipe.online_rollout,
            )  # fmt: skip
            if chain:
                yield index, chain
            for position, item in enumerate(chain):
                count[position] += len(item.anchors)
            if number % 100 == 99:
                rate = sum(count) / (time.monotonic() - started)
                self.log(f"rollout: {number + 1}/{len(own)} sequences, {count} blocks by round, {rate:.0f} blocks/s")

    # --- running -----------------------------------------------------------------------------------------

    def run(self, stop_at: int | None = None) -> None:
        """Train to the end of the schedule, or to step ``stop_at``, with logs, evaluations and checkpoints."""
        recipe = self.recipe
        if recipe.has_rounds and self.rollouts is None:
            self.refresh_rollouts()
        window: list[StepResult] = []
        began = mark = time.monotonic()
        while self.progress() < 1.0 and (stop_at is None or self.step < stop_at):
            self.elapsed += time.monotonic() - began
            began = time.monotonic()
            window.append(self.train_step())
            if self.step % recipe.log_steps == 0:
                self._report(window, time.monotonic() - mark)
                window, mark = [], time.monotonic()
            if recipe.has_rounds and recipe.refresh_steps and self.step % recipe.refresh_steps == 0:
                self.refresh_rollouts()
                mark = time.monotonic()
            if self.step % recipe.eval_steps == 0:
                self.evaluate()
                began = mark = time.monotonic()  # evaluation takes nothing from the schedule
            if self.step % recipe.checkpoint_steps == 0:
                self.save_checkpoint()
        if self.progress() >= 1.0:
            self.evaluate()
        self.save_checkpoint()

    def _report(self, window: list[StepResult], seconds: float) -> None:
        most = max(len(result.losses) for result in window)
        by_round = [[result.losses[i] for result in window if i < len(result.losses)] for i in range(most)]
        rounds = [sum(values) / len(values) for values in by_round]
        rate = sum(result.blocks for result in window) * self.world / seconds
        tau = sum(result.tau for result in window) / len(window)
        losses = " ".join(f"L{i} {loss:.3f}" for i, loss in enumerate(rounds, int(self.recipe.relay_only)))
        learning_rate = self.optimizer.param_groups[0]["lr"]
        tokens = rate * (self.recipe.block_size - 1)
        self.log(
            f"step {self.step} {losses} tau~{tau:.3f} lr {learning_rate:.2e} {rate:.0f} blocks/s {tokens:.0f} tokens/s "
            f"{self.elapsed / 60:.1f} min, {self.progress():.0%}"
        )
        self._record({"step": self.step, "losses": rounds, "tau": tau, "blocks_s": rate, "lr": learning_rate})

    def _record(self, record: dict[str, Any]) -> None:
        if self.rank == 0:
            with (self.run_dir / "log.jsonl").open("a") as out:
                out.write(json.dumps(record) + "\n")

    def evaluate(self) -> float:
        """Held-out tau, with the relay where there is one; keeps the best drafter in ``run_dir/best``."""
        if self.rank:
            return 0.0
        samples = self.held_out[: self.recipe.eval_sequences]
        arms = {"masks": False} | ({"relay": True} if self.recipe.has_relay else {})
        results = {name: replay(self.drafter, self.target, samples, relay=relay) for name, relay in arms.items()}
        parts = ", ".join(f"{name} {result.tau:.3f}" for name, result in results.items())
        self.log(f"step {self.step} held-out tau {parts} ({len(samples)} conversations)")
        self._record({"step": self.step, "held_out": {name: result.tau for name, result in results.items()}})
        plot_run(self.run_dir)
        tau = results["relay" if self.recipe.has_relay else "masks"].tau
        if tau > self.best_tau:
            self.best_tau = tau
            self.drafter.save(self.run_dir / "best")
        return tau

    def save_checkpoint(self) -> None:
        """Write the whole state, atomically; rollouts that it does not need any more are removed."""
        if self.rank:
            return
        path = self.run_dir / "checkpoint.pt"
        state = {
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "best_tau": self.best_tau,
            "elapsed": self.elapsed,
            "rollouts": None if self.rollouts is None else self.rollouts.folder.name,
        }
        partial = path.with_suffix(".part")
        torch.save(state, partial)
        partial.replace(path)
        if self.rollouts is not None:
            drop_older(self.rollouts.folder.parent, self.rollouts.folder)
        self.drafter.save(self.run_dir / "last")

    def resume(self) -> bool:
        """Continue from ``run_dir/checkpoint.pt`` if it is there."""
        path = self.run_dir / "checkpoint.pt"
        if not path.is_file():
            return False
        state = torch.load(path, weights_only=True)
        self.drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.best_tau, self.elapsed = state["step"], state["best_tau"], state["elapsed"]
        if state["rollouts"] is not None:
            self._open_rollouts(self.run_dir / "rollouts" / state["rollouts"])
        self.log(f"resumed at step {self.step}")
        return True


def optimizer_groups(parameters: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """Names of a drafter's parameters by optimiser group, in the optimiser's order."""
    groups: dict[str, list[str]] = {"matrices": [], "gains": [], "relay": []}
    for name, tensor in parameters.items():
        groups["relay" if name.startswith("relay.") else "matrices" if tensor.ndim > 1 else "gains"].append(name)
    return groups


def optimizer_numbers(parameters: dict[str, torch.Tensor]) -> dict[str, int]:
    """The optimiser's number of every parameter: it counts group by group."""
    names = [name for group in optimizer_groups(parameters).values() for name in group]
    return {name: number for number, name in enumerate(names)}


def load_partly(drafter: Drafter, state: dict[str, torch.Tensor], where: str) -> list[str]:
    """Load a drafter's state into one that may have a relay or a Domino head more; return the new parameters' names.

    A rescorer stays behind: it is fitted to the finished drafter (`sglang-dflow rescore`).

    Raises:
        ValueError: the two differ otherwise.
    """
    own = drafter.state_dict()
    state = {name: value for name, value in state.items() if not name.startswith("relay.relay_rescore.")}
    wrong = [name for name, value in state.items() if name not in own or own[name].shape != value.shape]
    missing = [name for name in own if name not in state]
    wrong += [name for name in missing if not name.startswith(("relay.", "domino."))]
    if wrong:
        raise ValueError(
            f"{where} does not fit the recipe: {wrong} are missing, unexpected or of other shapes; expected a drafter "
            "of the same sizes. Remedy: correct the recipe, or leave init_from and warm_start out."
        )
    drafter.load_state_dict(state, strict=False)
    return missing


def choose_device(wanted: str) -> torch.device:
    """The device of a recipe; ``auto`` is this process's GPU where there is one."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device


def main(argv: list[str] | None = None) -> int:
    """``sglang-dflow train RECIPE.yaml``: train a drafter."""
    parser = argparse.ArgumentParser(prog="sglang-dflow train", description=main.__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="override a recipe field")
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="stop there with a checkpoint, to be resumed")
    args = parser.parse_args(argv)
    import yaml

    fields: dict[str, Any] = yaml.safe_load(args.recipe.read_text())
    for item in args.set:
        name, _, value = item.partition("=")
        fields[name] = yaml.safe_load(value)
    recipe = Recipe.from_dict(fields, str(args.recipe))
    torch.set_num_threads(recipe.threads)
    device = choose_device(recipe.device)
    # Everything that the run creates lives on its device; random draws are made on the CPU, alike everywhere.
    torch.set_default_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = int(os.environ.get("RANK", "0"))
    run_dir = Path(recipe.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        made_with = versions() | {"git_commit": git_commit(), "machine": machine(), "python": platform.python_version()}
        (run_dir / "recipe.yaml").write_text(yaml.safe_dump(fields))
        (run_dir / "versions.json").write_text(json.dumps(made_with, indent=2) + "\n")
    target = Target.load(recipe.target, torch.bfloat16, recipe.target_layer_ids)
    features = target.shape.hidden_size * len(recipe.target_layer_ids)
    sequences = load_sequences(recipe.answers, features, target_layer_ids=recipe.target_layer_ids)

    def log(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    log(f"train: {len(sequences)} sequences, {sum(len(s.tokens) - s.prompt_len for s in sequences)} answer tokens")
    trainer = Trainer(recipe, target, sequences, log)
    if not trainer.resume() and recipe.warm_start is not None:
        trainer.warm_start(Path(recipe.warm_start))
    trainer.run(args.stop_at)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
