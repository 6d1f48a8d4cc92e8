"""``sglang-dflow inspect``: what a drafter checkpoint is, and whether DFLOW will serve it.

Reads config.json and the safetensors' headers; of the weights only the relay's last layer, whose being zero or not
tells a converted drafter from a trained one. The verdict comes from the functions that stop a launch (config.py), and
from what the host refuses when it loads the tensors. Imports neither sglang nor, without a target, transformers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_dflow.checkpoint_files import TensorHeader, locate, read_config, tensor_headers
from sglang_dflow.config import (
    RELAY_PREFIXES,
    DFlowConfig,
    checkpoint_problems,
    target_problems,
    tensor_problems,
)

DOMINO_PREFIXES = ("prefix_gru.", "embed_proj.")
PARTS: dict[str, tuple[str, ...]] = {
    "layers": ("layers.",),
    "context projection": ("fc.", "hidden_norm.", "encoder."),
    "relay": RELAY_PREFIXES,
    "Domino head": DOMINO_PREFIXES,
    "DFlash2 selector": ("candidate_selector.",),
    "final norm": ("norm.",),
    "embedding and head": ("embed_tokens.", "lm_head."),
}
"""Part of a drafter -> prefixes of its tensors (a ``model.`` in front is dropped); the rest is "other"."""


@dataclass(frozen=True)
class Part:
    """Size of one part of a drafter. ``dtype``: safetensors' names, comma-separated where mixed."""

    parameters: int
    nbytes: int
    dtype: str


@dataclass(frozen=True)
class Inspection:
    """What is known of a checkpoint.

    Attributes:
        checkpoint: its directory.
        family: "DFlash", "Domino" or "DFlash2"; what the relay was added to, if there is one.
        fields: what shapes it, by name; None where config.json does not say.
        relay: the relay's fields and ``last_layer``: "trained", "zero" or "missing"; None without a relay.
        parts: sizes by part, in the order of ``PARTS``.
        problems: everything that keeps DFLOW from serving it; empty if nothing does.
        target: the target it was checked against, None if it was not.
    """

    checkpoint: str
    family: str
    fields: dict[str, Any]
    relay: dict[str, Any] | None
    parts: dict[str, Part]
    problems: tuple[str, ...]
    target: str | None

    @property
    def serves(self) -> bool:
        return not self.problems


def inspect_checkpoint(source: str | Path, target: str | Path | None = None) -> Inspection:
    """Look at a drafter: a directory or a hub id, alone or beside its target.

    Raises:
        ValueError: ``source`` is no checkpoint at all (no config.json, no safetensors).
    """
    directory = locate(source)
    config, headers = read_config(directory), tensor_headers(directory)
    return Inspection(
        checkpoint=str(directory),
        family=family(config),
        fields=_fields(config),
        relay=_relay(config, headers),
        parts=_parts(headers),
        problems=tuple(problems_of(config, headers, target)),
        target=None if target is None else str(target),
    )


def _dflash_field(config: Mapping[str, Any], name: str) -> Any:
    """A field of the DFlash family, from ``dflash_config`` or, as older checkpoints have it, from the top level."""
    return {**config, **(config.get("dflash_config") or {})}.get(name)


def family(config: Mapping[str, Any]) -> str:
    """Return "DFlash", "Domino" or "DFlash2"."""
    if _dflash_field(config, "projector_type") == "domino":
        return "Domino"
    return "DFlash2" if _dflash_field(config, "selector_rank") else "DFlash"


def problems_of(config: Mapping[str, Any], headers: Mapping[str, TensorHeader], target: str | Path | None) -> list[str]:
    """Return everything that stops a launch with this drafter, in the launch's own words."""
    problems = checkpoint_problems(config)
    if problems:
        return problems  # as at launch: what is wrong with the rest cannot be told from a config that cannot be read
    shapes = {name.removeprefix("model."): header.shape for name, header in headers.items()}
    if target is not None:
        problems += target_problems(config, **_target_sizes(target))
    problems += tensor_problems(DFlowConfig.from_checkpoint(config).tensor_shapes(), shapes)
    return problems + _load_problems(config, shapes)


def _load_problems(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What the host's ``load_weights`` refuses, or (layers) would silently leave uninitialised."""
    hidden, layer_ids = config["hidden_size"], _dflash_field(config, "target_layer_ids")
    expected = {"fc.weight": (hidden, len(layer_ids) * hidden)}
    is_domino = family(config) == "Domino"
    if is_domino:
        gru, width = _dflash_field(config, "gru_hidden_dim"), _dflash_field(config, "emb_dim")
        if not gru or not width:
            return [f"gru_hidden_dim is {gru!r} and emb_dim {width!r}; a Domino head needs both in dflash_config"]
        expected |= {
            "prefix_gru.weight_ih_l0": (3 * gru, hidden),
            "prefix_gru.weight_hh_l0": (3 * gru, gru),
            "embed_proj.0.weight": (width, hidden + gru),
            "embed_proj.2.weight": (config["vocab_size"], width),
        }
    aliased = {name.removeprefix("encoder."): shape for name, shape in shapes.items()}  # a vendor's name for fc
    problems = tensor_problems(expected, aliased)
    if not is_domino and any(name.startswith(DOMINO_PREFIXES) for name in shapes):
        problems.append(
            "it holds the tensors of a Domino head, but dflash_config.projector_type is not 'domino'. Correct the "
            "config, or use the one that belongs to these tensors"
        )
    found = {int(name.split(".")[1]) for name in shapes if name.startswith("layers.")}
    absent = sorted(set(range(int(config.get("num_hidden_layers") or 0))) - found)
    if absent:
        problems.append(
            f"no tensors of layers {absent}, but num_hidden_layers is {config['num_hidden_layers']}. The host would "
            "leave them uninitialised: use the weights that belong to this config"
        )
    return problems


def _target_sizes(target: str | Path) -> dict[str, int]:
    """Sizes of a target, as ``target_problems`` takes them."""
    from transformers import AutoConfig

    try:
        text = AutoConfig.from_pretrained(str(target)).get_text_config()
    except OSError as error:
        raise ValueError(
            f"target {target} has no readable configuration ({str(error).splitlines()[0]}); expected a Hugging Face "
            "directory or hub id."
        ) from error
    layers = int(text.num_hidden_layers) * int(getattr(text, "num_loops", 1))
    return {"hidden_size": text.hidden_size, "vocab_size": text.vocab_size, "num_hidden_layers": layers}


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": list(config.get("architectures") or []),
        "block_size": _dflash_field(config, "block_size"),
        "num_hidden_layers": config.get("num_hidden_layers"),
        "hidden_size": config.get("hidden_size"),
        "intermediate_size": config.get("intermediate_size"),
        "num_attention_heads": config.get("num_attention_heads"),
        "num_key_value_heads": config.get("num_key_value_heads"),
        "vocab_size": config.get("vocab_size"),
        "target_layer_ids": _dflash_field(config, "target_layer_ids"),
        "num_target_layers": _dflash_field(config, "num_target_layers"),
        "mask_token_id": _dflash_field(config, "mask_token_id"),
        "shift_label": _dflash_field(config, "shift_label"),
    }


def _relay(config: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> dict[str, Any] | None:
    dflow = config.get("dflow_config")
    if not isinstance(dflow, Mapping):
        return None
    rms = _rms(headers, "relay_mlp.2.weight", "relay_mlp.2.bias")
    last = "missing" if rms is None else "trained" if rms else "zero"
    return {**dflow, "last_layer": last, "last_layer_rms": rms}


def _rms(headers: Mapping[str, TensorHeader], *names: str) -> float | None:
    """Root mean square over tensors that are read now; None if one is missing."""
    from safetensors import safe_open

    total, elements = 0.0, 0
    for name in names:
        found = next((key for key in headers if key.removeprefix("model.") == name), None)
        if found is None:
            return None
        with safe_open(headers[found].file, framework="pt") as handle:
            total += float(handle.get_tensor(found).double().square().sum())
        elements += headers[found].elements
    return (total / elements) ** 0.5


def _parts(headers: Mapping[str, TensorHeader]) -> dict[str, Part]:
    grouped: dict[str, list[TensorHeader]] = {name: [] for name in [*PARTS, "other"]}
    for name, header in headers.items():
        plain = name.removeprefix("model.")
        part = next((part for part, prefixes in PARTS.items() if plain.startswith(prefixes)), "other")
        grouped[part].append(header)
    return {
        name: Part(
            parameters=sum(header.elements for header in group),
            nbytes=sum(header.nbytes for header in group),
            dtype=", ".join(sorted({header.dtype for header in group})),
        )
        for name, group in grouped.items()
        if group
    }


def describe(found: Inspection) -> str:
    """The readable report."""
    f = found.fields
    rows = {
        "family": found.family + (" with a relay (DFlow)" if found.relay is not None else ", no relay"),
        "architecture": ", ".join(f["architectures"]) or "not told",
        "block size": f"{f['block_size']} (anchor included)",
        "layers": f"{f['num_hidden_layers']}, hidden {f['hidden_size']}, intermediate {f['intermediate_size']}, "
        f"heads {f['num_attention_heads']}/{f['num_key_value_heads']}",
        "captured layers": f"{f['target_layer_ids']} of {f['num_target_layers']}",
        "mask token": str(f["mask_token_id"]),
    }
    if found.family == "Domino":
        rows["shift_label"] = str(f["shift_label"])
    if found.relay is not None:
        rows["relay"] = ", ".join(f"{name.removeprefix('relay_')} {value}" for name, value in found.relay.items()
                                  if not name.startswith("last_layer"))  # fmt: skip
        rescored = bool(found.relay.get("relay_rescore_size"))
        rows["relay, last layer"] = {
            "zero": "zero: relays nothing" + ("" if rescored else ", decodes exactly like DFLASH"),
            "trained": f"trained (root mean square {found.relay['last_layer_rms'] or 0:.2e})",
            "missing": "missing",
        }[found.relay["last_layer"]]
    lines = [found.checkpoint, *(f"  {name:<18} {text}" for name, text in rows.items()), ""]
    total = Part(
        sum(part.parameters for part in found.parts.values()), sum(part.nbytes for part in found.parts.values()), ""
    )
    lines.append(f"  {'part':<18} {'parameters':>13} {'MB':>9}  dtype")
    for name, part in [*found.parts.items(), ("total", total)]:
        lines.append(f"  {name:<18} {part.parameters:>13,} {part.nbytes / 1e6:>9.2f}  {part.dtype}".rstrip())
    unchecked = "" if found.target is not None else "; the target was not checked, name it with --target"
    lines += ["", f"serves with DFLOW: {'yes' if found.serves else 'no'}{unchecked}"]
    return "\n".join([*lines, *(f"  - {problem}" for problem in found.problems)])


def main(argv: Sequence[str] | None = None) -> int:
    """``sglang-dflow inspect CHECKPOINT``: what a drafter is; exit status 0 if DFLOW will serve it, 1 if not."""
    parser = argparse.ArgumentParser(prog="sglang-dflow inspect", description=main.__doc__)
    parser.add_argument("checkpoint", help="drafter: a directory or hub id")
    parser.add_argument("--target", help="also check that it fits this target: a directory or hub id")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    args = parser.parse_args(argv)
    try:
        found = inspect_checkpoint(args.checkpoint, args.target)
    except ValueError as error:
        print(f"sglang-dflow inspect: {error}", file=sys.stderr)
        return 1
    print(json.dumps({**asdict(found), "serves": found.serves}) if args.json else describe(found))
    return 0 if found.serves else 1


if __name__ == "__main__":
    sys.exit(main())
