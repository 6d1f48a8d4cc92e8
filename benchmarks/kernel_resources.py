"""Registers, shared memory and spills of every relay kernel, compiled for GPUs that are not here.

    python -m benchmarks.kernel_resources            # all shapes: prints the table of docs/kernels.md
    python -m benchmarks.kernel_resources --quick    # every kernel in every dtype, for the test

The product's own wrappers choose shapes and constants; Triton is only kept from launching. Figures are read from the
binaries (`cuobjdump` of Triton's package). One line per binary: shapes that lead to the same constants share it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

TARGETS = {80: "sm_80", 90: "sm_90"}
MAX_SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that one block may have (CUDA programming guide, compute capabilities 8.0 and 9.0)."""
DTYPES = ("bfloat16", "float16", "float32")
HIDDEN_SIZES = (576, 2048, 2560, 4096, 5120)
BLOCK_SIZES = (8, 16)
BATCH_SIZES = (1, 8, 32)

_STATIC_SHARED = {80: 0, 90: 1024}  # reserved by the system; cuobjdump counts it, the limit does not


class Shape(NamedTuple):
    """One drafter in one batch; `width` is the relay MLP's."""

    dtype: str
    hidden_size: int
    block_size: int
    batch_size: int
    width: int
    stale_token: bool = False
    is_table: bool = True
    activation: str = "silu"


class Resources(NamedTuple):
    """What one binary takes. `shared` in bytes per block, `spilled` in bytes per thread (stack and local memory)."""

    registers: int
    shared: int
    spilled: int


class Binary(NamedTuple):
    """A kernel with its constants, as the table names it."""

    kernel: str
    dtype: str
    constants: str


def all_shapes() -> list[Shape]:
    """The matrix: two widths, and the options once each on one shape."""
    shapes = [
        Shape(dtype, hidden, block, batch, width)
        for dtype, hidden, block, batch in product(DTYPES, HIDDEN_SIZES, BLOCK_SIZES, BATCH_SIZES)
        for width in (256, 2 * hidden)
    ]
    one = Shape("bfloat16", 4096, 16, 32, 8192)
    options = [{"stale_token": True}, {"stale_token": True, "is_table": False}, {"activation": "gelu"}]
    return shapes + [one._replace(**option) for option in [*options, {"activation": "relu"}]]  # type: ignore[arg-type]


class _Driver:
    """Says which GPU to compile for; has none."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # the key of Triton's table of compiled kernels

    def get_current_stream(self, device: int) -> int:
        return 0


class Launch(NamedTuple):
    """What a wrapper asked Triton for; `compiled` is None where nothing was compiled."""

    kernel: str
    constants: dict[str, Any]
    compiled: Any


@contextlib.contextmanager
def no_launches(capability: int | None = None) -> Iterator[list[Launch]]:
    """Launches inside are noted and, given a `capability`, compiled for it; they go no further."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    run = JITFunction.run

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled = None if capability is None else run(self, *args, grid=grid, warmup=True, **kwargs)
        launches.append(Launch(self.fn.__name__.strip("_").removesuffix("_kernel"), kwargs, compiled))

    if capability is not None:
        driver.set_active(_Driver(capability))
    JITFunction.run = note
    try:
        yield launches
    finally:
        JITFunction.run = run
        if capability is not None:
            driver.set_active(None)  # the next use looks for one again


def launch_round(shape: Shape, *, during: contextlib.AbstractContextManager[Any] | None = None) -> None:
    """Store a batch and draft from it, on CPU tensors and inside `during`: to be called under `no_launches`."""
    import torch

    from sglang_dflow.relay.alignment import RelayRule, RelaySource
    from sglang_dflow.relay.draft_input import EmbedTokens, TokenTable, relayed_input
    from sglang_dflow.relay.modulation import RelayModulation
    from sglang_dflow.relay.pool import RelayPool, VerifiedBlock

    dtype, size, batch = getattr(torch, shape.dtype), shape.block_size, shape.batch_size

    def integers(*dims: int) -> torch.Tensor:
        return torch.zeros(dims, dtype=torch.int64)

    pool = RelayPool(
        num_rows=1, block_size=size, hidden_size=shape.hidden_size, dtype=dtype, device="cpu", use_kernels=True,
        rule=RelayRule.of(RelaySource.FIRST_REJECTION, shift_label=False), stale_token=shape.stale_token,
    )  # fmt: skip
    with torch.device("meta"):
        relay = RelayModulation(
            shape.hidden_size, shape.width, activation=shape.activation, stale_token=shape.stale_token
        ).to(dtype)
    states = torch.zeros(batch, size, shape.hidden_size, dtype=dtype)
    block = VerifiedBlock(
        states, integers(batch), integers(batch, size), integers(batch).int(), integers(batch), integers(batch, size)
    )
    table = torch.zeros(1, shape.hidden_size, dtype=dtype)
    embed: EmbedTokens = TokenTable(table) if shape.is_table else lambda ids: table.repeat(len(ids), 1)
    indices, positions = integers(batch), integers(batch, size)
    with during or contextlib.nullcontext():
        pool.store(indices, block)
        relayed_input(pool, relay, embed, indices, positions, states)


def _read(kernel: Any, capability: int) -> Resources:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text.stdout)}
    shared = kernel.metadata.shared + max(0, found["SHARED"] - _STATIC_SHARED[capability])
    return Resources(registers=found["REG"], shared=shared, spilled=found["STACK"] + found["LOCAL"])


def _named(kernel: str, shape: Shape, constants: dict[str, Any]) -> Binary:
    if kernel == "relay_store":
        return Binary(kernel, shape.dtype, f"row {constants['BLOCK_H']}")
    if kernel == "relay_tokens":
        return Binary(kernel, "-", f"rows {constants['ROWS']}")
    lines = constants["REQUESTS"] * constants["ROWS"]
    words = [f"{constants['REQUESTS']} x {constants['ROWS']} lines", f"{lines} x {constants['BLOCK_N']}"]
    words.append(f"k {constants['BLOCK_K']}")
    if kernel == "relay_gather":
        words += ["stale"] * shape.stale_token + ["looked up"] * constants["LOOKED_UP"]
        words += [shape.activation] * (shape.activation != "silu")
    return Binary(kernel, shape.dtype, ", ".join(words))


def binaries(shapes: Iterable[Shape]) -> dict[Binary, Shape]:
    """The binaries that these shapes launch, each with the first shape that does. Compiles nothing."""
    found: dict[Binary, Shape] = {}
    for shape in shapes:
        with no_launches() as launches:
            launch_round(shape)
        for launch in launches:
            found.setdefault(_named(launch.kernel, shape, launch.constants), shape)
    return found


def resources(shapes: Iterable[Shape], capability: int) -> dict[Binary, Resources]:
    """Compile one round of every shape for `capability` and read what its kernels take."""
    found: dict[Binary, Resources] = {}
    with no_launches(capability) as launches:
        for shape in shapes:
            launches.clear()
            launch_round(shape)
            for launch in launches:
                binary = _named(launch.kernel, shape, launch.constants)
                if binary not in found:
                    found[binary] = _read(launch.compiled, capability)
    return found


def quick_shapes() -> list[Shape]:
    """Every kernel in every dtype: both row tiles in bfloat16, the small one in the others."""
    shapes = [Shape(dtype, 4096, 16, 1, 256) for dtype in DTYPES]
    return [*shapes, Shape("bfloat16", 4096, 16, 32, 8192, stale_token=True, is_table=False)]


def _compile(task: tuple[int, list[Shape]]) -> tuple[int, dict[Binary, Resources]]:
    capability, shapes = task
    return capability, resources(shapes, capability)


def as_table(by_target: dict[int, dict[Binary, Resources]]) -> str:
    """Markdown, one line a binary; targets side by side."""
    head = ["kernel", "dtype", "constants"]
    for target in by_target:
        head += [f"{TARGETS[target]} registers", "shared", "spilled"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for binary in sorted(set().union(*by_target.values())):
        cells = [str(value) for target in by_target for value in by_target[target][binary]]
        lines.append("| " + " | ".join([*binary, *cells]) + " |")
    return "\n".join(lines)


def parse_table(markdown: str) -> dict[int, dict[Binary, Resources]]:
    """The inverse of `as_table`, from a page that holds such a table among other text."""
    by_target: dict[int, dict[Binary, Resources]] = {}
    for line in markdown.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[:3] == ["kernel", "dtype", "constants"]:
            by_target = {int(cell.removeprefix("sm_").split()[0]): {} for cell in cells if cell.startswith("sm_")}
        elif cells[0].startswith("relay_") and len(cells) == 3 + 3 * len(by_target):
            for index, target in enumerate(by_target):
                figures = map(int, cells[3 + 3 * index : 6 + 3 * index])
                by_target[target][Binary(*cells[:3])] = Resources(*figures)
    return by_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--target", type=int, choices=TARGETS, action="append", help="80 or 90; both by default")
    arguments = parser.parse_args()
    shapes = quick_shapes() if arguments.quick else all_shapes()
    by_dtype = [[shape for shape in shapes if shape.dtype == dtype] for dtype in DTYPES]
    by_target: dict[int, dict[Binary, Resources]] = {target: {} for target in arguments.target or TARGETS}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            for capability, found in pool.map(_compile, list(product(by_target, by_dtype))):
                by_target[capability] |= found
    import triton

    print(as_table(by_target))
    count = sum(map(len, by_target.values()))
    spilled = [binary for found in by_target.values() for binary, used in found.items() if used.spilled]
    print(f"\ntriton {triton.__version__}; {count} binaries; with spills: {len(spilled)}")


if __name__ == "__main__":
    main()
