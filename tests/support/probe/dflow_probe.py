"""A second SGLang plugin, for tests only: looks into a real server, or breaks it on purpose.

Found by the host through the `.dist-info` beside this file when the tests put this directory on a server's
PYTHONPATH; it never ships. What it does is chosen by the JSON in DFLOW_PROBE:

    {"trace": FILE}            append one JSON line per verified block: prefix lengths, proposals, accept lengths
    {"noise": FILE}            while it exists the relay pool stores noise instead of states (output must not change)
    {"greedy_verify": FILE}    while it exists sampled requests are verified greedily (a distribution test must notice)

`dflow_probe_lives.py` adds more.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def register() -> None:
    wanted = json.loads(os.environ.get("DFLOW_PROBE", "{}"))
    if "trace" in wanted:
        _trace(wanted["trace"])
    if "noise" in wanted:
        _noise(Path(wanted["noise"]))
    if "greedy_verify" in wanted:
        _greedy_verify(Path(wanted["greedy_verify"]))
    if {"lives", "switches", "pure"} & wanted.keys():
        import dflow_probe_lives

        dflow_probe_lives.register(wanted)


def _trace(path: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after(result: Any, worker: Any, *, candidates: Any, prefix_lens: Any, **kwargs: Any) -> None:
        entry = {
            "prefix_lens": prefix_lens.tolist(),
            "proposals": candidates.tolist(),
            "accept_lens": result[0].tolist(),
        }
        with open(path, "a") as sink:
            sink.write(json.dumps(entry) + "\n")

    target = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._accept_block"
    HookRegistry.register(target, after, HookType.AFTER)


def _noise(switch: Path) -> None:
    import torch

    from sglang_dflow.relay.pool import RelayPool

    store = RelayPool.store
    generator = torch.Generator().manual_seed(0)

    def noisy(self: RelayPool, req_pool_indices: torch.Tensor, block: Any) -> None:
        if switch.exists():
            noise = torch.randn(block.hidden.shape, generator=generator).to(block.hidden) * 10.0
            block = block._replace(hidden=noise)
        store(self, req_pool_indices, block)

    RelayPool.store = noisy  # type: ignore[method-assign]


def _greedy_verify(switch: Path) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def around(original: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
        if switch.exists():
            kwargs["sampling_info"] = None  # as if every request were greedy
        return original(worker, *args, **kwargs)

    target = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._accept_block"
    HookRegistry.register(target, around, HookType.AROUND)
