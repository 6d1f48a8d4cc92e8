"""Training recipes: a YAML file read into one frozen dataclass; all problems are reported at once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METHODS = ("dflash", "dflow")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run."""

    target: str  # Hugging Face directory of the target
    answers: list[str]  # files written by prepare-data
    run_dir: str  # checkpoints, log, best drafter
    method: str = "dflash"  # dflash: round 0 only; dflow: round 0 and one relayed round
    init_from: str | None = None  # drafter checkpoint to start from; None: from the target's layers
    warm_start: str | None = None  # checkpoint.pt of another run: its weights and optimiser moments
    # drafter
    num_layers: int = 3
    source_layers: list[int] = dataclasses.field(default_factory=lambda: [27, 28, 29])
    target_layer_ids: list[int] = dataclasses.field(default_factory=lambda: [1, 8, 15, 22, 28])
    block_size: int = 8
    mask_token_id: int = 4
    relay_source: str = "first_rejection"
    relay_hidden_size: int = 576
    relay_activation: str = "silu"
    # steps
    sequences: int = 4  # S per step
    anchors: int = 48  # A per sequence, drafted from masks
    relayed_anchors: int = 32  # per sequence, dflow only
    rollout_anchors: int = 24  # verified per sequence and refresh, dflow only
    rollout_sequences: int = 1500  # sequences of one refresh, dflow only
    refresh_steps: int = 0  # make the rollouts anew every so many steps; 0: once
    steps: int = 4000
    max_minutes: float = 0.0  # 0: no limit; else the schedule also ends with this wall time
    learning_rate: float = 1e-3
    relay_learning_rate: float = 1e-3
    min_learning_rate_ratio: float = 0.03
    warmup_steps: int = 60
    weight_decay: float = 0.01
    betas: list[float] = dataclasses.field(default_factory=lambda: [0.9, 0.98])
    grad_clip: float = 1.0
    gamma: float = 4.0
    frequent_tokens: int = 5000  # always in the softmax
    negatives: int = 1000  # sampled from the rest of the vocabulary, importance-corrected
    # bookkeeping
    seed: int = 0
    threads: int = 2
    held_out: int = 40  # one conversation in so many is never trained on
    log_steps: int = 20
    eval_steps: int = 500
    checkpoint_steps: int = 250

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a YAML file; relative paths in it are relative to the working directory."""
        import yaml

        return cls.from_dict(yaml.safe_load(Path(path).read_text()), str(path))

    @classmethod
    def from_dict(cls, fields: dict[str, Any], where: str = "recipe") -> Recipe:
        """Build from plain fields."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        problems = [f"unknown field {name!r}" for name in fields if name not in known]
        problems += [
            f"missing field {name!r}"
            for name, f in known.items()
            if name not in fields and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        if fields.get("method", "dflash") not in METHODS:
            problems.append(f"method is {fields['method']!r}, expected one of {', '.join(METHODS)}")
        layers, source = fields.get("num_layers", 3), fields.get("source_layers", [0, 0, 0])
        if len(source) != layers:
            problems.append(f"source_layers names {len(source)} target layers, expected num_layers = {layers}")
        if problems:
            raise ValueError(f"{where}: " + "; ".join(problems) + ". Remedy: see recipes/smollm2-135m-b8.yaml.")
        return cls(**fields)
