"""What a rescorer costs a round: time and operations of `ServedRescorer`, the head's product in it, on random states.

    OMP_NUM_THREADS=1 python -m benchmarks.rescore_cost --drafter sglang_dflow/assets/smollm2-135m-dflow-b8

Sizes come from the drafter; weights and tokens are random, which changes nothing in the work. On a GPU (`--device
cuda`) the operations are counted as launched eagerly; in the draft's CUDA graph they are replayed. Output: one table,
then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dflow.arguments import positive_int
from sglang_dflow.checkpoint_files import locate, read_config
from sglang_dflow.config import DFlowConfig
from sglang_dflow.provenance import git_commit, machine, versions
from sglang_dflow.relay.pool import RelayPool
from sglang_dflow.serving.rescore import HeadRows, ServedRescorer


class _Operations(TorchDispatchMode):
    """Counts operations that compute: views launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def make_rescorer(config: DFlowConfig, vocab_size: int, requests: int, device: str) -> ServedRescorer:
    """A served rescorer of a drafter's sizes whose pool holds a round of every request."""
    pool = RelayPool(
        num_rows=requests + 1, block_size=config.block_size, hidden_size=config.hidden_size, rule=config.rule,
        dtype=torch.float32, device=device, stale_token=True, proposals=True, use_kernels=False,
    )  # fmt: skip
    assert pool.stale is not None and pool.proposed is not None
    pool.stale.random_(0, vocab_size)
    pool.proposed.random_(0, vocab_size)
    pool.rounds[:, 2] = 1  # the draft noted a round of one accepted draft
    rescorer = config.make_rescorer(device)
    assert rescorer is not None
    head = SimpleNamespace(weight=torch.randn(vocab_size, config.hidden_size, device=device))
    if device == "cpu":  # as the CPU platform packs it
        from sglang_dflow.cpu.linear import PackedHeadMethod

        head.quant_method = PackedHeadMethod()
    rows = HeadRows(head, SimpleNamespace(world_size=1))
    return ServedRescorer(rescorer, pool, rows, lambda ids: head.weight[ids])


@torch.no_grad()
def _times(call: Callable[[], torch.Tensor], args: argparse.Namespace) -> list[float]:
    """Milliseconds of each repeat, the lowest and highest tenth left out, in order."""
    call()
    times = []
    for _ in range(args.repeats):
        began = time.perf_counter()
        call()
        if args.device != "cpu":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    cut = args.repeats // 10
    return sorted(times)[cut : args.repeats - cut]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", type=Path, required=True, help="a drafter with a rescorer")
    parser.add_argument("--requests", type=positive_int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=positive_int, default=50)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    raw = read_config(locate(args.drafter))
    config, vocab_size = DFlowConfig.from_checkpoint(raw), int(raw["vocab_size"])
    if not config.relay_rescore_size:
        parser.error(f"{args.drafter} has no rescorer; expected a drafter of `sglang-dflow rescore`")
    measured = []
    print("| requests | rescorer ms, median (p10..p90) | head and argmax alone ms | operations |\n|---|---|---|---|")
    for requests in args.requests:
        rescore = make_rescorer(config, vocab_size, requests, args.device)
        rows = requests * (config.block_size - 1)
        slots = torch.arange(1, requests + 1, device=args.device)
        hidden = torch.randn(rows, config.hidden_size, device=args.device)
        with torch.no_grad(), _Operations() as operations:
            rescore(slots, hidden)
        times = _times(lambda: rescore(slots, hidden), args)  # noqa: B023 (called at once)
        plain = _times(lambda: rescore.head.all_logits(hidden).argmax(-1), args)  # noqa: B023
        cuts = [f"{statistics.median(found):.2f} ({found[0]:.2f}..{found[-1]:.2f})" for found in (times, plain)]
        print(f"| {requests} | {cuts[0]} | {cuts[1]} | {operations.count} |")
        measured.append(
            {
                "requests": requests,
                "ms": statistics.median(times),
                "head_and_argmax_ms": statistics.median(plain),
                "operations": operations.count,
            }
        )
    made_with = {"versions": versions() | {"git_commit": git_commit()}, "machine": machine()}
    print(json.dumps({"drafter": str(args.drafter), "repeats": args.repeats, "measured": measured, **made_with}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
