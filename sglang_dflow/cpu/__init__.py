"""The torch-CPU platform: the real SGLang server without a GPU, chosen by `SGLANG_PLATFORM=dflow_cpu`.

Owns the entry point that the host calls while it resolves its platform. Limits: made for development, tests and
the demo, not for speed; dense MHA/GQA models, no quantised KV cache; no draft graph on several ranks.
"""

from __future__ import annotations

import os

PLATFORM_NAME = "dflow_cpu"
PLATFORM_CLASS = "sglang_dflow.cpu.platform.DFlowCpuPlatform"
GRAPH_SWITCH = "SGLANG_DFLOW_CPU_GRAPH"
"""Environment variable: `on` (default) replays the draft forward from a graph (graph_runner.py), `off` runs eagerly."""


# libgomp's waiting threads spin about 300,000 rounds before they sleep. Beside any other busy process that makes two
# threads ten times slower than one (measured: a 576 x 3072 linear of 8 rows on 2 busy cores, 15.9 ms against 1.5 ms).
GOMP_SPINCOUNT = "10000"


def activate() -> str | None:
    """Return the platform's class name when it was asked for by name, else None.

    With `SGLANG_PLATFORM` unset the host calls every installed platform and takes the one that answers, so
    answering there would take a CUDA machine away from its GPU. This platform therefore only answers to its name.
    """
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    # Read by libgomp when it is loaded: too late for this process, in time for the workers it starts.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", GOMP_SPINCOUNT)
    # CUDA keeps the rotary table in fp32; off CUDA the host would round it to the model's type.
    os.environ.setdefault("SGLANG_ROPE_CACHE_FP32", "1")
    return PLATFORM_CLASS
