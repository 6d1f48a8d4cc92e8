"""Memory that oneDNN's compiled kernels take as batches of ever new sizes arrive, as they are and with padded rows.

    OMP_NUM_THREADS=1 python -m benchmarks.compiled_kernels

Makes the products of a decoder (one of each shape of the demo target and drafter) with packed weights for batches of
random sizes: half of them 1 to 64 rows, half 1 to 300, the head 1 to 64. Prints what glibc's `mallinfo2` counts as in
use, as growth since the weights were packed. Each arm runs in a process of its own; the last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import random

import torch

from sglang_dflow.cpu.linear import PackedWeight, padded_rows
from sglang_dflow.provenance import versions

SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576), (2880, 576))  # [in, out]: qkv, o, gate-up, down, fc
HEAD = (576, 49152)


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


def in_use_mb() -> float:
    """What malloc has given out and not taken back, in MB (glibc)."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return float(info.uordblks + info.hblkhd) / 1e6


def _linear(packed: PackedWeight, weight: torch.Tensor, rows: int) -> None:
    packed.linear(torch.randn(rows, weight.shape[1]), weight, None)


def growth(padded: bool, batches: int, every: int, seed: int) -> list[float]:
    """Growth in MB after every so many batches."""
    if not padded:
        # The product as it was before rows were padded: every count is a size of its own.
        import sglang_dflow.cpu.linear as module

        module.padded_rows = lambda count: count
    torch.set_num_threads(1)
    weights = [torch.randn(out, size) for size, out in (*SHAPES, HEAD)]
    packed = [PackedWeight() for _ in weights]
    for one, weight in zip(packed, weights):
        _linear(one, weight, 8)
    before, draw, told = in_use_mb(), random.Random(seed), []
    for number in range(1, batches + 1):
        rows = draw.choice([draw.randrange(1, 65), draw.randrange(1, 301)])
        for one, weight in zip(packed[:-1], weights):
            _linear(one, weight, rows)
        _linear(packed[-1], weights[-1], draw.randrange(1, 65))
        if number % every == 0:
            told.append(round(in_use_mb() - before, 1))
    return told


def main() -> int:
    """Run both arms."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    told = {}
    for name, padded in (("as they are", False), ("padded", True)):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            told[name] = pool.apply(growth, (padded, args.batches, args.every, args.seed))
        print(f"rows {name}: MB after every {args.every} batches: {told[name]}", flush=True)
    sizes = len({padded_rows(count) for count in range(1, 301)})
    print(json.dumps({"growth_mb": told, "padded_sizes_up_to_300": sizes, "seed": args.seed, "versions": versions()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
