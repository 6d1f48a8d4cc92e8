"""What a relay should cost, by counting: bytes and operations of its kernels against those of a DFLASH round.

    python -m benchmarks.relay_budget         # two markdown tables, then one JSON line

A roofline, not a measurement. Assumptions: every part takes the longer of its bytes over the memory bandwidth and its
operations over the dense bf16 rate, parts run one after another; weights are read once per part, the KV cache once
(`CONTEXT` tokens a request); activations, norms and launches of the host's layers count nothing, which makes the round
too short and the relay's share too large; every launch of the relay costs `LAUNCH_US` on top, and every row that can be
relayed is. The drafter is z-lab's layout for Qwen3: five of the target's layers, five captured states, block 16.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

from sglang_dflow.relay.kernels.apply import apply_bytes, apply_operations
from sglang_dflow.relay.kernels.gather import gather_bytes, gather_operations
from sglang_dflow.relay.kernels.store import store_bytes

BLOCK_SIZE = 16
NUM_ROWS = BLOCK_SIZE - 1  # `first_rejection`, the larger of the two rules
CONTEXT = 1024
LAUNCH_US = 2.0
DRAFT_LAYERS = 5
CONCURRENCY = (1, 2, 4, 8, 16, 32)
ITEMSIZE = 2


class Gpu(NamedTuple):
    """Vendor's figures of the 80 GB SXM part: memory bandwidth in bytes/s, dense bf16 operations/s."""

    name: str
    bandwidth: float
    rate: float


GPUS = (Gpu("A100", 2.039e12, 312e12), Gpu("H100", 3.35e12, 989e12))


@dataclass(frozen=True)
class Target:
    """A Qwen3 target (its published `config.json`); head size 128."""

    name: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int = 8
    vocabulary: int = 151_936

    @property
    def layer_weights(self) -> int:
        attention = self.hidden_size * 128 * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden_size


TARGETS = (
    Target("Qwen3-1.7B", layers=28, hidden_size=2048, intermediate_size=6144, heads=16),
    Target("Qwen3-4B", layers=36, hidden_size=2560, intermediate_size=9728, heads=32),
    Target("Qwen3-8B", layers=36, hidden_size=4096, intermediate_size=12_288, heads=32),
)


class Cost(NamedTuple):
    """Bytes moved and operations."""

    bytes: float
    operations: float

    def seconds(self, gpu: Gpu) -> float:
        return max(self.bytes / gpu.bandwidth, self.operations / gpu.rate)


def _layers(target: Target, layers: int, batch_size: int) -> Cost:
    """`layers` layers over the rows of a batch of blocks, with their attention."""
    rows = batch_size * BLOCK_SIZE
    cache = batch_size * CONTEXT * layers * 2 * target.kv_heads * 128
    attention = 4 * rows * CONTEXT * target.heads * 128 * layers
    weights = layers * target.layer_weights
    return Cost(ITEMSIZE * (weights + cache), 2 * rows * weights + attention)


def _product(weights: int, rows: int) -> Cost:
    return Cost(ITEMSIZE * weights, 2 * rows * weights)


def round_parts(target: Target, batch_size: int) -> list[Cost]:
    """A DFLASH round: draft layers and head, target layers and head, projection and draft KV of the verified block."""
    rows = batch_size * BLOCK_SIZE
    hidden = target.hidden_size
    return [
        _layers(target, DRAFT_LAYERS, batch_size),
        _product(target.head_weights, batch_size * (BLOCK_SIZE - 1)),
        _layers(target, target.layers, batch_size),
        _product(target.head_weights, rows),
        _product(5 * hidden * hidden, rows),
        _product(DRAFT_LAYERS * hidden * 2 * target.kv_heads * 128, rows),
    ]


def relay_parts(hidden_size: int, width: int, batch_size: int, *, stale_token: bool = False) -> list[Cost]:
    """The relay's three launches, by the formulas beside the kernels."""
    rows = {"batch_size": batch_size, "hidden_size": hidden_size}
    product = rows | {"num_rows": NUM_ROWS, "width": width}
    return [
        Cost(store_bytes(**rows, block_size=BLOCK_SIZE, itemsize=ITEMSIZE, stale_token=stale_token), 0),
        Cost(
            gather_bytes(**product, itemsize=ITEMSIZE, stale_token=stale_token),
            gather_operations(**product, stale_token=stale_token),
        ),
        Cost(apply_bytes(**product, itemsize=ITEMSIZE), apply_operations(**product)),
    ]


def round_seconds(target: Target, batch_size: int, gpu: Gpu) -> float:
    return sum(part.seconds(gpu) for part in round_parts(target, batch_size))


def relay_seconds(hidden_size: int, width: int, batch_size: int, gpu: Gpu, *, stale_token: bool = False) -> float:
    """Roofline and launches of one round."""
    parts = relay_parts(hidden_size, width, batch_size, stale_token=stale_token)
    return sum(part.seconds(gpu) + LAUNCH_US * 1e-6 for part in parts)


def widths(hidden_size: int) -> dict[str, int]:
    """The public precedent's width, the one of the shipped demo drafter (384 at H = 576), and a narrow one."""
    return {"2H": 2 * hidden_size, "2H/3": round(2 * hidden_size / 3 / 16) * 16, "256": 256}


def shares(*, stale_token: bool = False) -> list[dict[str, object]]:
    """Relay over DFLASH round for every target, GPU and width; one share per concurrency."""
    found: list[dict[str, object]] = []
    for target in TARGETS:
        for gpu in GPUS:
            for name, width in widths(target.hidden_size).items():
                relay = [relay_seconds(target.hidden_size, width, n, gpu, stale_token=stale_token) for n in CONCURRENCY]
                whole = [round_seconds(target, n, gpu) for n in CONCURRENCY]
                found.append(
                    {
                        "target": target.name,
                        "gpu": gpu.name,
                        "width": f"{name} = {width}" if name != "256" else name,
                        "relay_us": [round(1e6 * seconds, 1) for seconds in relay],
                        "round_us": [round(1e6 * seconds) for seconds in whole],
                        "share": [round(part / all_, 5) for part, all_ in zip(relay, whole)],
                    }
                )
    return found


def bytes_table() -> str:
    lines = ["| target | width | store MB | gather MB | apply MB | GFLOP |", "|---|---|---|---|---|---|"]
    for target in TARGETS:
        for width in widths(target.hidden_size).values():
            for batch_size in (1, 32):
                parts = relay_parts(target.hidden_size, width, batch_size)
                moved = " | ".join(f"{part.bytes / 1e6:.2f}" for part in parts)
                operations = sum(part.operations for part in parts) / 1e9
                lines.append(f"| {target.name}, batch {batch_size} | {width} | {moved} | {operations:.2f} |")
    return "\n".join(lines)


def share_table(rows: list[dict[str, object]]) -> str:
    lines = ["| target | GPU | width | " + " | ".join(map(str, CONCURRENCY)) + " |", "|---|---|---|" + "---|" * 6]
    for row in rows:
        cells = [
            f"{100 * share:.2f} % ({relay:.0f} / {whole} us)"
            for share, relay, whole in zip(row["share"], row["relay_us"], row["round_us"])  # type: ignore[call-overload]
        ]
        lines.append(f"| {row['target']} | {row['gpu']} | {row['width']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    rows = shares()
    print("MB moved and GFLOP of a round, by launch\n")
    print(bytes_table())
    print("\nShare of a DFLASH round by concurrency (relay / round)\n")
    print(share_table(rows))
    print(json.dumps({"launch_us": LAUNCH_US, "context": CONTEXT, "block_size": BLOCK_SIZE, "shares": rows}))


if __name__ == "__main__":
    main()
