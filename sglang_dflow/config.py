"""What a DFlow checkpoint says of itself, read and validated in one go.

A DFlow drafter is a DFlash-family drafter whose `config.json` carries a `dflow_config` object beside
`dflash_config`, and whose safetensors carry `relay_norm.*` and `relay_mlp.{0,2}.*`. This module owns the meaning
of those fields and every complaint about them: all problems of a checkpoint come in one error, each with what was
expected and what to do. Knows nothing of the host; configurations come in as plain mappings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dflow.relay.alignment import RelayRule, RelaySource
from sglang_dflow.relay.modulation import ACTIVATIONS, RelayModulation
from sglang_dflow.relay.rescore import RelayRescorer

DFLOW_ARCHITECTURES: dict[str, str] = {
    "DFlashDraftModel": "DFlowDraftModel",
    "DFlash2DraftModel": "DFlow2DraftModel",
}
"""Architecture of a DFlash-family checkpoint -> architecture of the same drafter with a relay."""

RELAY_PREFIXES = ("relay_norm.", "relay_mlp.", "relay_rescore.")

_REQUIRED = ("relay_source", "relay_hidden_size", "relay_activation")
RESCORE_FIELDS = ("relay_rescore_size", "relay_rescore_top_k", "relay_rescore_code_size")
_OPTIONAL = ("relay_norm_eps", "relay_stale_token", *RESCORE_FIELDS)


@dataclass(frozen=True)
class DFlowConfig:
    """The relay of one checkpoint.

    Attributes:
        hidden_size: drafter hidden size `H`.
        block_size: `B`, anchor included.
        shift_label: True for next-token (Domino) drafters; shifts the alignment by one row.
        relay_source: which rejected rows are relayed.
        relay_hidden_size: width `W` of the relay MLP.
        relay_activation: its activation, a key of `relay.modulation.ACTIVATIONS`.
        relay_norm_eps: epsilon of the relay's LayerNorm; the drafter's `rms_norm_eps` by default.
        relay_stale_token: True if the MLP also reads the embedding of the target's own top-1 at each source row.
        relay_rescore_size: width of the rescorer (`relay/rescore.py`); 0 without one.
        relay_rescore_top_k: how many of the drafter's best tokens it chooses from.
        relay_rescore_code_size: size of its token codes.
    """

    hidden_size: int
    block_size: int
    shift_label: bool
    relay_source: RelaySource
    relay_hidden_size: int
    relay_activation: str
    relay_norm_eps: float
    relay_stale_token: bool = False
    relay_rescore_size: int = 0
    relay_rescore_top_k: int = 0
    relay_rescore_code_size: int = 0

    @property
    def rule(self) -> RelayRule:
        """The alignment that this checkpoint was trained with."""
        return RelayRule.of(self.relay_source, shift_label=self.shift_label)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the relay's tensors, as the checkpoint must hold them."""
        h, w = self.hidden_size, self.relay_hidden_size
        rescorer = self.make_rescorer("meta")
        rescore = {} if rescorer is None else {n: tuple(t.shape) for n, t in rescorer.state_dict().items()}
        return {
            "relay_norm.weight": (h,),
            "relay_norm.bias": (h,),
            "relay_mlp.0.weight": (w, (4 if self.relay_stale_token else 3) * h),
            "relay_mlp.0.bias": (w,),
            "relay_mlp.2.weight": (2 * h, w),
            "relay_mlp.2.bias": (2 * h,),
            **{f"relay_rescore.{name}": shape for name, shape in rescore.items()},
        }

    def make_relay(self) -> RelayModulation:
        """Return this checkpoint's relay, not loaded yet."""
        return RelayModulation(
            self.hidden_size,
            self.relay_hidden_size,
            activation=self.relay_activation,
            norm_eps=self.relay_norm_eps,
            stale_token=self.relay_stale_token,
            rescorer=self.make_rescorer(),
        )

    def make_rescorer(self, device: str | None = None) -> RelayRescorer | None:
        """Return this checkpoint's rescorer, not loaded yet; None without one."""
        if not self.relay_rescore_size:
            return None
        return RelayRescorer(
            self.block_size,
            self.hidden_size,
            self.relay_rescore_size,
            top_k=self.relay_rescore_top_k,
            code_size=self.relay_rescore_code_size,
            device=device,
        )

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, Any], *, where: str = "drafter") -> DFlowConfig:
        """Read a checkpoint's `config.json`.

        Raises:
            ValueError: every problem of the file, in one message.
        """
        problems = checkpoint_problems(config)
        raise_problems(problems, where=where)
        return cls._read(config)

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> DFlowConfig:
        dflow = config["dflow_config"]
        return cls(
            hidden_size=int(config["hidden_size"]),
            block_size=int(_dflash_field(config, "block_size")),
            shift_label=bool(_dflash_field(config, "shift_label")),
            relay_source=RelaySource(dflow["relay_source"]),
            relay_hidden_size=int(dflow["relay_hidden_size"]),
            relay_activation=dflow["relay_activation"],
            relay_norm_eps=float(dflow.get("relay_norm_eps", config.get("rms_norm_eps", 1e-6))),
            relay_stale_token=dflow.get("relay_stale_token", False),
            **{name: int(dflow.get(name, 0)) for name in RESCORE_FIELDS},
        )


def raise_problems(problems: Sequence[str], *, where: str) -> None:
    """Raise one ValueError that lists `problems`; return if there are none."""
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise ValueError(f"DFLOW cannot start with {where}: {len(problems)} problem(s)\n{listed}")


def _dflash_field(config: Mapping[str, Any], name: str) -> Any:
    """A field of the DFlash family: in `dflash_config`, or at top level as older checkpoints have it."""
    nested = config.get("dflash_config")
    return nested.get(name, config.get(name)) if isinstance(nested, Mapping) else config.get(name)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def checkpoint_problems(config: Mapping[str, Any]) -> list[str]:
    """Return everything that keeps this `config.json` from being served by DFLOW; [] if nothing does."""
    architectures = list(config.get("architectures") or [])
    if not isinstance(config.get("dflow_config"), Mapping):
        return [
            f"it is a plain DFlash checkpoint (architectures {architectures}, no dflow_config object). Convert it "
            "with `sglang-dflow convert SRC DST` (zero relay: decodes exactly like DFLASH until it is trained), "
            "or serve it with --speculative-algorithm DFLASH"
        ]
    problems = []
    if not set(architectures) & set(DFLOW_ARCHITECTURES.values()):
        problems.append(
            f"architectures is {architectures}, expected one of {sorted(DFLOW_ARCHITECTURES.values())}. "
            "Make the checkpoint with `sglang-dflow convert` or `sglang-dflow train`"
        )
    problems += _relay_field_problems(config["dflow_config"]) + _rescore_problems(config)
    problems += _dflash_field_problems(config)
    return problems


def _relay_field_problems(dflow: Mapping[str, Any]) -> list[str]:
    problems = [
        f"dflow_config.{name} is missing. It must match training, so there is no default: "
        "take it from the training recipe"
        for name in _REQUIRED
        if name not in dflow
    ]
    unknown = sorted(set(dflow) - set(_REQUIRED) - set(_OPTIONAL))
    if unknown:
        problems.append(
            f"dflow_config has unknown fields {unknown}, expected {[*_REQUIRED, *_OPTIONAL]}. "
            "A newer checkpoint needs a newer sglang-dflow"
        )
    sources = [source.value for source in RelaySource]
    if "relay_source" in dflow and dflow["relay_source"] not in sources:
        problems.append(f"dflow_config.relay_source is {dflow['relay_source']!r}, expected one of {sources}")
    if "relay_hidden_size" in dflow and not _is_count(dflow["relay_hidden_size"]):
        problems.append(
            f"dflow_config.relay_hidden_size is {dflow['relay_hidden_size']!r}, expected a positive integer"
        )
    eps = dflow.get("relay_norm_eps", 1e-6)
    if not isinstance(eps, int | float) or isinstance(eps, bool) or eps <= 0:
        problems.append(f"dflow_config.relay_norm_eps is {eps!r}, expected a positive number")
    stale = dflow.get("relay_stale_token", False)
    if not isinstance(stale, bool):
        problems.append(f"dflow_config.relay_stale_token is {stale!r}, expected true or false")
    if "relay_activation" in dflow and dflow["relay_activation"] not in ACTIVATIONS:
        problems.append(
            f"dflow_config.relay_activation is {dflow['relay_activation']!r}, expected one of {sorted(ACTIVATIONS)}"
        )
    return problems


def _rescore_problems(config: Mapping[str, Any]) -> list[str]:
    dflow = config["dflow_config"]
    size = dflow.get("relay_rescore_size", 0)
    if size == 0 and not isinstance(size, bool):
        return []
    if not _is_count(size):
        return [f"dflow_config.relay_rescore_size is {size!r}, expected a positive integer, or 0 for no rescorer"]
    problems = [
        f"dflow_config.{name} is {dflow.get(name)!r}, expected an integer of at least {least}, as the rescorer was "
        "fitted with. Fit it again with `sglang-dflow rescore`"
        for name, least in zip(RESCORE_FIELDS[1:], (2, 1))
        if not _is_count(dflow.get(name)) or dflow[name] < least
    ]
    if dflow.get("relay_stale_token") is not True:
        problems.append(
            "dflow_config.relay_rescore_size is set without relay_stale_token: a rescorer compares drafts with stale "
            "tokens. Use a drafter with relay_stale_token true"
        )
    for name, head in (("projector_type", "a Domino"), ("selector_rank", "a DFlash2")):
        if _dflash_field(config, name):
            problems.append(
                f"dflow_config.relay_rescore_size is set for {head} drafter, whose head chooses its drafts one by one; "
                "a rescorer was trained for the plain head. Set it to 0"
            )
    return problems


def _dflash_field_problems(config: Mapping[str, Any]) -> list[str]:
    problems = []
    if config.get("has_embed_tokens"):
        problems.append(
            "has_embed_tokens is true: the drafter brings its own embedding (Nemotron layout), which the host "
            "recognises by the DFlash architecture name only. Serve it with --speculative-algorithm DFLASH"
        )
    if not _is_count(config.get("hidden_size")):
        problems.append(f"hidden_size is {config.get('hidden_size')!r}, expected a positive integer")
    block_size = _dflash_field(config, "block_size")
    if not _is_count(block_size) or block_size < 2:
        problems.append(
            f"block_size is {block_size!r}, expected an integer of at least 2: the block the drafter was trained with"
        )
    if not _dflash_field(config, "target_layer_ids"):
        problems.append(
            "dflash_config.target_layer_ids is missing; the host would guess the captured layers silently and "
            "draft badly. Add the layers that the drafter was trained with"
        )
    if _dflash_field(config, "sample_from_anchor"):
        problems.append(
            "sample_from_anchor is true: this drafter proposes from the anchor row (DeepSpec layout), which DFLASH "
            "and DFLOW would serve shifted by one position. Use a drafter that proposes from the mask rows only"
        )
    return problems


def target_problems(
    config: Mapping[str, Any],
    *,
    hidden_size: int,
    vocab_size: int,
    num_hidden_layers: int,
) -> list[str]:
    """Return how a drafter's `config.json` fails to fit a target of the given sizes; [] if it fits."""
    problems = []
    for name, expected in (("hidden_size", hidden_size), ("vocab_size", vocab_size)):
        found = config.get(name)
        if found is not None and found != expected:
            problems.append(
                f"{name} is {found}, but the target's is {expected}. The drafter borrows the target's embedding and "
                "head: use the target that it was trained for"
            )
    layer_ids = _dflash_field(config, "target_layer_ids") or []
    beyond = [i for i in layer_ids if not isinstance(i, int) or not 0 <= i < num_hidden_layers]
    if beyond:
        problems.append(
            f"dflash_config.target_layer_ids has {beyond}, but the target has layers 0..{num_hidden_layers - 1}: "
            "use the target that the drafter was trained for"
        )
    trained_layers = _dflash_field(config, "num_target_layers")
    if trained_layers is not None and trained_layers != num_hidden_layers:
        problems.append(
            f"num_target_layers is {trained_layers}, but the target has {num_hidden_layers} layers: "
            "use the target that the drafter was trained for"
        )
    return problems


def tensor_problems(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
) -> list[str]:
    """Return missing and misshaped relay tensors; `found` may hold other tensors too (a `model.` prefix is dropped)."""
    named = {name.removeprefix("model."): tuple(shape) for name, shape in found.items()}
    problems = [
        f"tensor {name} is missing, expected shape {shape}. Convert or train the checkpoint again"
        for name, shape in expected.items()
        if name not in named
    ]
    problems += [
        f"tensor {name} has shape {named[name]}, expected {shape} by config.json. "
        "Correct dflow_config or use the checkpoint that belongs to it"
        for name, shape in expected.items()
        if name in named and named[name] != shape
    ]
    return problems
