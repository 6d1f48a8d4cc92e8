"""Training recipes: a YAML file read into one frozen dataclass; all problems are reported at once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METHODS = ("dflash", "dflash-sc", "dflow", "domino", "domino-dflow")
"""``dflash``: round 0 from masks. ``dflash-sc`` (self-conditioning): rounds 1..k as well, at the anchors where the
drafter's own proposals were rejected, from masks. ``dflow``: the same rounds with the relay. ``domino`` and
``domino-dflow``: ``dflash`` and ``dflow`` with a Domino head."""

BOUNDARY_TOKENS = ("bonus", "rejected")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run."""

    target: str  # Hugging Face directory of the target
    answers: list[str]  # files written by prepare-data
    run_dir: str  # checkpoints, log, best drafter
    method: str = "dflash"
    init_from: str | None = None  # drafter checkpoint to start from; None: from the target's layers
    warm_start: str | None = None  # checkpoint.pt of another run: its weights and optimiser moments
    # drafter
    num_layers: int = 3
    source_layers: list[int] = dataclasses.field(default_factory=lambda: [27, 28, 29])
    target_layer_ids: list[int] = dataclasses.field(default_factory=lambda: [1, 8, 15, 22, 28])
    block_size: int = 8
    mask_token_id: int = 4
    # relay: dflow and domino-dflow
    relay_source: str = "first_rejection"
    relay_hidden_size: int = 576
    relay_activation: str = "silu"
    relay_stale_token: bool = False  # the MLP also reads the target's own top-1 at each source row
    relay_fc_gradient: bool = False  # fc and hidden_norm learn from relayed rows, too; the method detaches them
    relay_only: bool = False  # the relay learns alone, on relayed blocks only; the drafter stays that of init_from
    relay_without: list[str] = dataclasses.field(default_factory=list)  # ablation: boundary tokens read as zeros
    # Domino head: domino and domino-dflow
    gru_hidden_dim: int = 256
    emb_dim: int = 64
    shift_label: bool = False
    domino_base_weight: float = 0.5  # weight of the loss of the base logits beside that of the corrected ones
    online_rollout: bool = True  # rollouts follow the head's own predictions; false: teacher-forced ones
    # rounds: dflash-sc, dflow and domino-dflow
    rounds: int = 2  # k
    relayed_anchors: int = 16  # blocks per sequence and round
    rollout_anchors: int = 48  # verified per sequence and refresh
    rollout_sequences: int = 1000  # sequences of one refresh
    refresh_steps: int = 0  # make the rollouts anew every so many steps; 0: once
    # steps
    sequences: int = 4  # S per step
    anchors: int = 48  # A per sequence, drafted from masks
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
    device: str = "auto"  # cpu, cuda, or auto: cuda where there is one
    seed: int = 0
    threads: int = 2
    held_out: int = 40  # one conversation in so many is never trained on
    eval_sequences: int = 24  # held-out conversations of one evaluation
    log_steps: int = 20
    eval_steps: int = 500
    checkpoint_steps: int = 250

    @property
    def has_rounds(self) -> bool:
        """Whether the method trains on rounds behind the first."""
        return self.method in ("dflash-sc", "dflow", "domino-dflow")

    @property
    def has_relay(self) -> bool:
        """Whether the drafter has a relay."""
        return self.method in ("dflow", "domino-dflow")

    @property
    def has_domino(self) -> bool:
        """Whether the drafter has a Domino head."""
        return self.method in ("domino", "domino-dflow")

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a YAML file; relative paths in it are relative to the working directory."""
        import yaml

        return cls.from_dict(yaml.safe_load(Path(path).read_text()), str(path))

    @classmethod
    def from_dict(cls, fields: dict[str, Any], where: str = "recipe") -> Recipe:
        """Build from plain fields.

        Raises:
            ValueError: all problems of the recipe, in one message.
        """
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
        if fields.get("rounds", 1) < 1:
            problems.append(f"rounds is {fields['rounds']}, expected at least 1 (method dflash has no rounds)")
        if fields.get("relay_only") and not (
            fields.get("init_from") and fields.get("method") in ("dflow", "domino-dflow")
        ):
            problems.append("relay_only needs method dflow or domino-dflow, and init_from: the drafter that stays")
        for token in fields.get("relay_without", []):
            if token not in BOUNDARY_TOKENS:
                problems.append(f"relay_without names {token!r}, expected {' or '.join(BOUNDARY_TOKENS)}")
        if problems:
            raise ValueError(f"{where}: " + "; ".join(problems) + ". Remedy: see recipes/smollm2-135m-b8.yaml.")
        return cls(**fields)
