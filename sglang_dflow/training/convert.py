"""DFlash-family checkpoint -> DFlow checkpoint with a zero relay, and back.

Owns the conversion of config.json and the relay's initial tensors. Everything else is carried over byte for byte:
existing tensors (Domino and DFlash2 heads among them) keep type and content, other config fields keep their values,
other files are copied. Sharded weights are written as one file. The relay's last layer starts at zero, so a converted
drafter decodes exactly like the DFlash drafter it came from.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_dflow.checkpoint_files import INDEX, WEIGHTS, locate, read_config, tensor_headers, weight_files
from sglang_dflow.config import (
    DFLOW_ARCHITECTURES,
    RELAY_PREFIXES,
    RESCORE_FIELDS,
    DFlowConfig,
    checkpoint_problems,
    raise_problems,
)
from sglang_dflow.relay.rescore import RelayRescorer

RESCORE_PREFIX = "relay_rescore."
RESCORE_WEIGHTS = "relay_rescore.safetensors"


def convert_dflash_to_dflow(
    src: str | Path,
    dst: str | Path,
    *,
    relay_source: str = "first_rejection",
    relay_hidden_size: int | None = None,
    relay_activation: str = "silu",
    relay_stale_token: bool = False,
    seed: int = 0,
) -> Path:
    """Write ``dst``: the drafter of ``src`` (a directory or a hub id) with a zero-initialised relay.

    ``relay_hidden_size`` defaults to the drafter's hidden size. ``seed`` draws the relay's first layer.
    """
    src, dst = locate(src), Path(dst)
    config = read_config(src)
    names = _swap_architectures(
        config, DFLOW_ARCHITECTURES, src, "sglang-dflow convert SRC DST expects a DFlash drafter"
    )
    dflow = {
        "relay_source": relay_source,
        "relay_hidden_size": int(relay_hidden_size or config["hidden_size"]),
        "relay_activation": relay_activation,
    }
    if relay_stale_token:
        dflow["relay_stale_token"] = True
    converted = _insert_after(config | {"architectures": names}, "dflash_config", "dflow_config", dflow)
    raise_problems(checkpoint_problems(converted), where=f"the conversion of {src}")
    parsed = DFlowConfig.from_checkpoint(converted, where=str(src))

    def edit(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        dtype = tensors["fc.weight"].dtype if "fc.weight" in tensors else next(iter(tensors.values())).dtype
        relay = relay_tensors(parsed, dtype, seed)
        clash = sorted(set(relay) & set(tensors))
        if clash:
            raise ValueError(f"{src} already holds relay tensors {clash}; expected a plain DFlash drafter.")
        return tensors | relay

    return _write(src, dst, converted, edit)


def strip_relay(src: str | Path, dst: str | Path) -> Path:
    """Write ``dst``: the DFlow drafter of ``src`` (a directory or a hub id) without its relay."""
    src, dst = locate(src), Path(dst)
    config = read_config(src)
    back = {new: old for old, new in DFLOW_ARCHITECTURES.items()}
    names = _swap_architectures(config, back, src, "--strip expects a DFlow drafter")
    stripped = {k: v for k, v in (config | {"architectures": names}).items() if k != "dflow_config"}

    def edit(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(RELAY_PREFIXES)}

    return _write(src, dst, stripped, edit)


def attach_rescorer(src: str | Path, dst: str | Path, rescorer: RelayRescorer) -> Path:
    """Write ``dst``: the DFlow drafter of ``src`` with this rescorer, in a file of its own beside the other weights."""
    from safetensors.torch import save_file

    src, dst = locate(src), Path(dst)
    config, files, headers = read_config(src), weight_files(src), tensor_headers(src)
    sizes = (rescorer.size, rescorer.top_k, rescorer.code_size)
    config["dflow_config"] = config["dflow_config"] | dict(zip(RESCORE_FIELDS, sizes))
    raise_problems(checkpoint_problems(config), where=f"a rescorer for {src}")
    is_old = {name: name.removeprefix("model.").startswith(RESCORE_PREFIX) for name in headers}
    names = {name: headers[name].file.name for name, old in is_old.items() if not old}  # tensor -> file
    if {headers[name].file.name for name, old in is_old.items() if old} & set(names.values()):
        raise ValueError(
            f"{src} holds a rescorer among its other tensors; expected it in a file of its own. Remedy: begin with the "
            "drafter that has none."
        )
    make_empty(dst)
    for path in files:
        if path.name in names.values():
            shutil.copy2(path, dst / path.name)
    _copy_others(src, dst, files)
    tensors = {f"{RESCORE_PREFIX}{name}": tensor.cpu().contiguous() for name, tensor in rescorer.state_dict().items()}
    save_file(tensors, dst / RESCORE_WEIGHTS, metadata={"format": "pt"})
    (dst / RESCORE_WEIGHTS).chmod(0o644)
    names |= dict.fromkeys(tensors, RESCORE_WEIGHTS)
    size = sum((dst / name).stat().st_size for name in set(names.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(names.items()))}
    (dst / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (dst / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return dst


def relay_tensors(config: DFlowConfig, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """A fresh relay's tensors: first layer random, last layer zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        relay = config.make_relay()
    return {name: tensor.to(dtype).contiguous() for name, tensor in relay.state_dict().items()}


def _swap_architectures(config: dict[str, Any], table: dict[str, str], src: Path, expected: str) -> list[str]:
    names = list(config.get("architectures") or [])
    if not names or any(name not in table for name in names):
        raise ValueError(f"{src} has architectures {names}, expected one of {sorted(table)}: {expected}.")
    return [table[name] for name in names]


def _insert_after(config: dict[str, Any], anchor: str, name: str, value: Any) -> dict[str, Any]:
    """``config`` with ``name`` behind ``anchor`` (or at the end), other fields in their order."""
    out: dict[str, Any] = {}
    for key, old in config.items():
        out[key] = old
        if key == anchor:
            out[name] = value
    out.setdefault(name, value)
    return out


def _write(
    src: Path,
    dst: Path,
    config: dict[str, Any],
    edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> Path:
    from safetensors import safe_open
    from safetensors.torch import save_file

    files = weight_files(src)
    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as handle:
            metadata |= handle.metadata() or {}
            tensors |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not a mapping)
    edited = edit(tensors)
    make_empty(dst)
    _copy_others(src, dst, files)
    save_file(edited, dst / WEIGHTS, metadata=metadata or None)
    (dst / WEIGHTS).chmod(0o644)
    (dst / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return dst


def make_empty(dst: Path) -> None:
    """Make a directory to write a checkpoint into.

    Raises:
        ValueError: it exists and holds something, or is no directory.
    """
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise ValueError(f"{dst} exists and is not an empty directory; choose another destination.")
    dst.mkdir(parents=True, exist_ok=True)


def _copy_others(src: Path, dst: Path, weights: list[Path]) -> None:
    for path in src.iterdir():
        if path.is_file() and path not in weights and path.name not in (INDEX, "config.json", "README.md"):
            shutil.copy2(path, dst / path.name)


def main(argv: list[str] | None = None) -> int:
    """``sglang-dflow convert SRC DST``: add a zero relay to a DFlash drafter, or take a relay off (--strip)."""
    parser = argparse.ArgumentParser(prog="sglang-dflow convert", description=main.__doc__)
    parser.add_argument("src", help="checkpoint directory (config.json, safetensors in one file or shards) or hub id")
    parser.add_argument("dst", type=Path, help="directory to write; must not exist or be empty")
    parser.add_argument("--strip", action="store_true", help="DFlow -> DFlash: remove the relay")
    parser.add_argument("--relay-source", choices=["first_rejection", "suffix"], default="first_rejection")
    parser.add_argument("--relay-hidden-size", type=int, default=None, help="default: the drafter's hidden size")
    parser.add_argument("--relay-activation", default="silu")
    parser.add_argument("--relay-stale-token", action="store_true", help="the relay also reads the target's own top-1")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        if args.strip:
            strip_relay(args.src, args.dst)
        else:
            convert_dflash_to_dflow(
                args.src,
                args.dst,
                relay_source=args.relay_source,
                relay_hidden_size=args.relay_hidden_size,
                relay_activation=args.relay_activation,
                relay_stale_token=args.relay_stale_token,
                seed=args.seed,
            )
    except ValueError as error:
        print(f"sglang-dflow convert: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.dst}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
