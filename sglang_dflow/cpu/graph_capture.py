"""Capture and replay of one function on the CPU, with the rules of a CUDA graph.

`capture` runs a function once and records its operations at the level below autograd (`torch.fx`, `make_fx`); a replay
repeats those operations and nothing else. As in a CUDA graph, whatever the function decided in Python is baked: shapes,
branches, numbers read from a tensor, and the storage of every tensor that it reads or writes. So what would go wrong
inside a CUDA graph goes wrong here: a host read raises at capture, and anything that a replay does not repeat shows as
a difference from running the function.

Imports torch only. Known gap: `Tensor.tolist` and `numpy` bypass the dispatcher, so they are baked without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

Replay = Callable[[], torch.Tensor]
"""Repeats the captured operations on the captured storage and returns what the function would return."""

_capturing = False

_HOST_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class _RefuseHostReads(TorchDispatchMode):
    """Raises where an operation reads a value on the host, or has a shape that depends on one."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(tag in func.tags for tag in _HOST_READS) and not _is_plain_index(func, args):
            raise RuntimeError(
                f"{func} reads a tensor on the host while a graph is captured; expected tensor operations of fixed "
                "shapes only. Select with torch.where, or read before the graph and write into a static buffer"
            )
        return func(*args, **(kwargs or {}))


def _is_plain_index(func: Any, args: Sequence[Any]) -> bool:
    """Whether this is indexing by integers; only indexing by a mask has a shape that depends on values."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(index is None or index.dtype != torch.bool for index in args[1])


def capture(function: Callable[[], torch.Tensor]) -> Replay:
    """Run `function()` once and return its replay.

    Inputs are tensors that it closes over: written in place they are seen by the next replay, replaced they are not.

    Raises:
        RuntimeError: the function reads a tensor on the host (`item`, a branch, a data-dependent shape).
    """

    def refusing() -> torch.Tensor:
        with _RefuseHostReads():
            return function()

    global _capturing
    _capturing = True
    try:
        graph: Replay = make_fx(refusing)()
    finally:
        _capturing = False
    return graph


def is_capturing() -> bool:
    """Whether a function is being captured: what must stay one opaque operation asks this."""
    return _capturing
