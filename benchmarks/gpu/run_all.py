"""Everything that needs a GPU, in one run of a few minutes: `benchmarks/gpu/run_all.sh`.

    1. parity     every case of parity.py on the device, and production shapes, against float64
    2. graph      replays with new pool contents equal the eager computation; launches counted, no allocation
    3. timings    each kernel, the whole relay fused and unfused (torch and cuBLAS) in a captured graph, by shape;
                  achieved bytes/s of the fused one against a measured copy
    4. share      relay over a stand-in round of Qwen3 size, both captured

Prints a table for each and one JSON line last; a check that fails ends the run with its message, after the JSON line.
`--dry-run` goes through the same code on the CPU, kernels interpreted, timings replaced by single calls.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.parity import CASES, Case, check
from benchmarks.gpu.stand_in import Round
from benchmarks.relay_budget import BLOCK_SIZE, ITEMSIZE, NUM_ROWS, TARGETS, Target, relay_parts, widths
from sglang_dflow.relay.alignment import RelayRule, RelaySource
from sglang_dflow.relay.draft_input import TokenTable, relayed_input
from sglang_dflow.relay.kernels.apply import relay_apply
from sglang_dflow.relay.kernels.gather import Embeddings, relay_gather
from sglang_dflow.relay.modulation import RelayModulation
from sglang_dflow.relay.pool import RelayPool, VerifiedBlock

VOCABULARY = 4096
BATCH_SIZES = (1, 8, 32)
TINY = Target("tiny", layers=2, hidden_size=96, intermediate_size=192, heads=2, kv_heads=1, vocabulary=512)
COPY_BYTES = 2 << 30


class Relay(NamedTuple):
    """One drafter's relay with a stored batch; `fused` takes the kernels, `unfused` torch operations and cuBLAS."""

    fused: RelayPool
    unfused: RelayPool
    modulation: RelayModulation
    table: TokenTable
    slots: torch.Tensor
    block: VerifiedBlock
    positions: torch.Tensor
    blocks: torch.Tensor

    def store(self, pool: RelayPool) -> None:
        pool.store(self.slots, self.block)

    def draft(self, pool: RelayPool) -> torch.Tensor:
        return relayed_input(pool, self.modulation, self.table, self.slots, self.positions, self.blocks)


def make_relay(hidden_size: int, width: int, batch_size: int, device: str, *, block_size: int = BLOCK_SIZE) -> Relay:
    """A batch in bfloat16 whose requests accepted nothing: every row that can be relayed is."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, shape, device=device)

    def pool(use_kernels: bool) -> RelayPool:
        return RelayPool(
            num_rows=batch_size + 1, block_size=block_size, hidden_size=hidden_size, dtype=torch.bfloat16,
            rule=RelayRule.of(RelaySource.FIRST_REJECTION, shift_label=False), device=device, use_kernels=use_kernels,
        )  # fmt: skip

    with torch.device(device):
        modulation = RelayModulation(hidden_size, width).bfloat16()
    torch.nn.init.normal_(modulation.relay_mlp[2].weight, std=width**-0.5)
    prefix_lens = torch.randint(1, 1000, (batch_size,), device=device)
    none = torch.zeros(batch_size, dtype=torch.int32, device=device)
    return Relay(
        fused=pool(True),
        unfused=pool(False),
        modulation=modulation,
        table=TokenTable(normal(VOCABULARY, hidden_size)),
        slots=torch.arange(1, batch_size + 1, device=device),
        block=VerifiedBlock(
            hidden=normal(batch_size, block_size, hidden_size), prefix_lens=prefix_lens,
            candidates=ids(batch_size, block_size), accept_len=none, bonus=ids(batch_size),
        ),
        positions=(prefix_lens + 1)[:, None] + torch.arange(block_size, device=device),
        blocks=normal(batch_size, block_size, hidden_size),
    )  # fmt: skip


class Clock:
    """Seconds of a call: median over replays of a captured graph, or one call on the CPU."""

    def __init__(self, device: str) -> None:
        self.is_gpu = device == "cuda"

    def capture(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return a replay of `call`; `call` itself on the CPU."""
        if not self.is_gpu:
            return call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def seconds(self, call: Callable[[], Any], *, repeats: int = 20, calls: int = 10) -> float:
        """Median over `repeats` of the mean of `calls` replays back to back."""
        replay = self.capture(call)
        if not self.is_gpu:
            start = time.perf_counter()
            replay()
            return time.perf_counter() - start
        taken = []
        for _ in range(repeats):
            start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start_event.record()
            for _ in range(calls):
                replay()
            end_event.record()
            torch.cuda.synchronize()
            taken.append(start_event.elapsed_time(end_event) / calls / 1e3)
        return statistics.median(taken)


def parity(device: str) -> dict[str, Any]:
    """Largest error per dtype, over the cases and the production shapes."""
    cases = dict(CASES)
    if device == "cuda":
        for hidden, block_size, requests in itertools.product((576, 2048, 2560, 4096, 5120), (8, 16), (1, 7)):
            case = Case(
                torch.bfloat16, block_size, hidden, 640, RelaySource.FIRST_REJECTION, requests=requests,
                accept="none",
            )  # fmt: skip
            cases[f"H {hidden}, B {block_size}, {requests} requests"] = case
        for dtype, hidden in itertools.product((torch.float16, torch.float32), (576, 2560)):
            cases[f"{dtype}, H {hidden}"] = Case(dtype, 16, hidden, 256, accept="none", stale_token=True)
    else:
        cases = {name: case for name, case in cases.items() if name in ("suffix", "stale_looked_up", "bad_state")}
    print(f"\n{'parity: dtype':<18}{'cases':>6}{'kernels':>10}{'torch path':>12}")
    outcomes: dict[str, list[Any]] = {}
    for case in cases.values():
        outcomes.setdefault(str(case.dtype), []).append(check(case, device))
    result = {}
    for dtype, found in outcomes.items():
        kernels, torch_path = (max(column) for column in list(zip(*found))[:2])
        result[dtype] = {"cases": len(found), "kernels": kernels, "torch_path": torch_path}
        print(f"{dtype:<18}{len(found):>6}{kernels:>10.1e}{torch_path:>12.1e}")
    return result


@torch.no_grad()
def graph(device: str) -> dict[str, Any]:
    """A captured draft sees what was stored after the capture; launches by name; bytes allocated by three rounds."""
    hidden, batch_size = (2560, 4) if device == "cuda" else (72, 2)
    relay = make_relay(hidden, hidden, batch_size, device)
    relay.store(relay.fused)
    masks = relay.blocks.clone()
    replay = Clock(device).capture(lambda: relay.draft(relay.fused))
    for accepted in (0, 3, BLOCK_SIZE - 1):
        relay.block.accept_len.fill_(accepted)
        relay.block.hidden.normal_()
        relay.positions.copy_(
            (relay.block.prefix_lens + accepted + 1)[:, None] + torch.arange(BLOCK_SIZE, device=device)
        )
        relay.store(relay.fused)
        relay.blocks.copy_(masks)
        replay()
        replayed = relay.blocks.clone()
        relay.blocks.copy_(masks)
        relay.draft(relay.fused)
        assert torch.equal(replayed, relay.blocks), f"replay differs from the eager computation, {accepted} accepted"
        assert (accepted == BLOCK_SIZE - 1) == torch.equal(replayed, masks), "full acceptance alone relays nothing"
    if device != "cuda":
        return {"replays": 3, "launches": None, "allocations": None}
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        relay.store(relay.fused)
        replay()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    launches = count_launches(lambda: (relay.store(relay.fused), replay()))
    print(f"\ngraph: replay equals eager; launches a round {launches}; allocations in three rounds {allocations}")
    assert sum(launches.values()) <= 3, f"expected at most 3 launches a round, found {launches}"
    assert allocations == 0, f"expected no allocation in a round, found {allocations} in three"
    return {"replays": 3, "launches": launches, "allocations": allocations}


def count_launches(call: Callable[[], Any]) -> dict[str, int]:
    """Kernels, copies and fills that one call puts on the device, by name."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    counted: dict[str, int] = {}
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            counted[event.name] = counted.get(event.name, 0) + 1
    return counted


def copy_bandwidth(clock: Clock, device: str) -> float:
    """Bytes/s of a large copy, read and written bytes counted."""
    size = COPY_BYTES if device == "cuda" else 1 << 20
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    source.random_()
    return 2 * size / clock.seconds(lambda: target.copy_(source), calls=3)


@torch.no_grad()
def timings(targets: tuple[Target, ...], device: str) -> dict[str, Any]:
    """Microseconds of each kernel and of the whole relay, fused and unfused."""
    clock = Clock(device)
    copy = copy_bandwidth(clock, device)
    print(f"\ncopy: {copy / 1e9:.0f} GB/s")
    columns = ("store us", "gather us", "apply us", "fused us", "unfused us", "% of copy")
    print(f"{'relay: target':<16}{'width':>6}{'bs':>4}" + "".join(f"{name:>11}" for name in columns))
    rows = []
    for target in targets:
        for width in widths(target.hidden_size).values():
            for batch_size in BATCH_SIZES if device == "cuda" else (1,):
                rows.append(_timed(clock, copy, target, width, batch_size, device))
                row = rows[-1]
                cells = [row[name] for name in ("store_us", "gather_us", "apply_us", "fused_us", "unfused_us")]
                print(
                    f"{target.name:<16}{width:>6}{batch_size:>4}"
                    + "".join(f"{cell:>11.1f}" for cell in cells)
                    + f"{100 * row['of_copy']:>11.0f}"
                )
    return {"copy_bytes_per_s": copy, "rows": rows}


def _timed(clock: Clock, copy: float, target: Target, width: int, batch_size: int, device: str) -> dict[str, Any]:
    relay = make_relay(target.hidden_size, width, batch_size, device)
    pool, modulation, table = relay.fused, relay.modulation, relay.table
    embeddings = Embeddings(table.weight, looked_up=False)

    def whole(which: RelayPool) -> Callable[[], None]:
        def call() -> None:
            relay.store(which)
            relay.draft(which)

        return call

    relay.store(pool)
    activations = relay_gather(pool, modulation, embeddings, relay.slots, relay.positions)
    calls: dict[str, Callable[[], Any]] = {
        "store_us": lambda: relay.store(pool),
        "gather_us": lambda: relay_gather(pool, modulation, embeddings, relay.slots, relay.positions),
        "apply_us": lambda: relay_apply(pool, modulation, activations, relay.slots, relay.positions, relay.blocks),
        "fused_us": whole(relay.fused),
        "unfused_us": whole(relay.unfused),
    }
    row: dict[str, Any] = {name: 1e6 * clock.seconds(call) for name, call in calls.items()}
    moved = sum(part.bytes for part in relay_parts(target.hidden_size, width, batch_size))
    row["of_copy"] = moved / (row["fused_us"] * 1e-6) / copy
    return {"target": target.name, "width": width, "batch_size": batch_size, "bytes": moved} | row


@torch.no_grad()
def share(targets: tuple[Target, ...], relay_rows: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """Relay over stand-in round, by target, width and batch size."""
    clock = Clock(device)
    print(f"\n{'share: target':<16}{'bs':>4}{'round ms':>10}   relay / round by width, fused (unfused)")
    rows = []
    for target in targets:
        for batch_size in BATCH_SIZES if device == "cuda" else (1,):
            round_ = Round(target, batch_size, device)
            blocks = torch.randn(batch_size * BLOCK_SIZE, target.hidden_size, device=device, dtype=torch.bfloat16)
            seconds = clock.seconds(functools.partial(round_, blocks), repeats=5, calls=2)
            del round_
            cells = []
            for row in relay_rows:
                if (row["target"], row["batch_size"]) == (target.name, batch_size):
                    fused, unfused = (row[name] * 1e-6 / seconds for name in ("fused_us", "unfused_us"))
                    rows.append(
                        {"target": target.name, "batch_size": batch_size, "width": row["width"],
                         "round_ms": 1e3 * seconds, "fused": fused, "unfused": unfused}
                    )  # fmt: skip
                    cells.append(f"{row['width']}: {100 * fused:.2f} % ({100 * unfused:.2f} %)")
            print(f"{target.name:<16}{batch_size:>4}{1e3 * seconds:>10.2f}   " + "   ".join(cells))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, kernels interpreted")
    device = "cpu" if parser.parse_args().dry_run else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; expected one. `--dry-run` goes through the same code on the CPU")
    import triton

    torch.manual_seed(0)
    targets = TARGETS if device == "cuda" else (TINY,)
    started = time.perf_counter()
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu, interpreted: timings mean nothing",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "argv": sys.argv[1:],
        "bytes_per_value": ITEMSIZE,
        "rows_of_a_block": NUM_ROWS,
    }
    problems = []
    for name, part in (
        ("parity", lambda: parity(device)),
        ("graph", lambda: graph(device)),
        ("timings", lambda: timings(targets, device)),
        ("share", lambda: share(targets, result["timings"]["rows"], device)),
    ):
        part_started = time.perf_counter()
        try:
            result[name] = part()
        except AssertionError as error:
            problems.append(f"{name}: {error}")
        result[f"{name}_s"] = round(time.perf_counter() - part_started, 1)
    result["seconds"] = round(time.perf_counter() - started, 1)
    result["problems"] = problems
    print(json.dumps(result))
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
