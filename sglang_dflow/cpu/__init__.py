"""The torch-CPU platform: the real SGLang server without a GPU, chosen by `SGLANG_PLATFORM=dflow_cpu`.

Owns the entry point that the host calls while it resolves its platform. Limits: made for development, tests and
the demo, not for speed; one rank, dense MHA/GQA models, no quantised KV cache.
"""

from __future__ import annotations

import os

PLATFORM_NAME = "dflow_cpu"
PLATFORM_CLASS = "sglang_dflow.cpu.platform.DFlowCpuPlatform"


def activate() -> str | None:
    """Return the platform's class name when it was asked for by name, else None.

    With `SGLANG_PLATFORM` unset the host calls every installed platform and takes the one that answers, so
    answering there would take a CUDA machine away from its GPU. This platform therefore only answers to its name.
    """
    return PLATFORM_CLASS if os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME else None
