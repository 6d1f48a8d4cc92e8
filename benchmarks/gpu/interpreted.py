"""Run a module with its Triton kernels interpreted: `python -m benchmarks.gpu.interpreted MODULE [ARGS]`.

A process of its own: Triton decides between compiling and interpreting when a kernel is defined.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any


def interpret() -> None:
    """Interpret every kernel of this process from now on; before anything imports triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    dot = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *options: Any) -> Any:
        # The interpreter keeps bfloat16 as 16-bit integers and would multiply those (triton 3.8). Widening is exact.
        widened = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, *widened, acc, *options)

    InterpreterBuilder.create_dot = create_dot


if __name__ == "__main__":
    interpret()
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
