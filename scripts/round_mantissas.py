"""Round a bf16 checkpoint's matrices to fewer mantissa bits, so that it compresses: for weights kept in git.

    python scripts/round_mantissas.py SRC DST --bits 3

bf16 stores 7 mantissa bits. Norms and biases keep all of them. Names, shapes and types stay, so it loads as before.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

STORED_BITS = 7


def round_mantissa(values: torch.Tensor, bits: int) -> torch.Tensor:
    """bf16 tensor with all but ``bits`` mantissa bits zero, rounded to nearest, ties to even; same shape."""
    drop = STORED_BITS - bits
    if drop == 0:
        return values
    pattern = values.view(torch.int16).to(torch.int32) & 0xFFFF
    odd = (pattern >> drop) & 1
    rounded = (pattern + (1 << (drop - 1)) - 1 + odd) >> drop << drop
    return rounded.to(torch.int16).view(torch.bfloat16)


def main() -> None:
    """Write DST, a rounded copy of SRC."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("src", type=Path)
    parser.add_argument("dst", type=Path)
    parser.add_argument("--bits", type=int, choices=range(1, STORED_BITS + 1), required=True)
    args = parser.parse_args()
    if (args.src / "model.safetensors.index.json").exists():
        parser.error(f"{args.src} has its weights in several files; expected one, without a rescorer: round first.")
    tensors = load_file(args.src / "model.safetensors")
    wrong = sorted(name for name, tensor in tensors.items() if tensor.dtype != torch.bfloat16)
    if wrong:
        parser.error(f"{wrong} are not bfloat16; expected a bf16 checkpoint, as `sglang-dflow train` writes it.")
    rounded = {name: round_mantissa(t, args.bits) if t.ndim > 1 else t for name, t in tensors.items()}
    args.dst.mkdir(parents=True, exist_ok=True)
    save_file(rounded, args.dst / "model.safetensors", metadata={"format": "pt"})
    (args.dst / "model.safetensors").chmod(0o644)
    shutil.copy(args.src / "config.json", args.dst / "config.json")


if __name__ == "__main__":
    main()
