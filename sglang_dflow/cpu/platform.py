"""The host-facing half of the CPU platform: identity, server defaults, factories.

Relies on SGLang 0.5.23: `SRTPlatform` (out-of-tree platform interface), `arg_groups.choices` (extension lists) and
`record_foreign_defaults` (a platform's writes to the server arguments are declared, not assigned). Everything that
has no seam in that interface is a record in `hooks.py`. Imports of host modules other than the interface are
deferred: the host resolves its platform while its own modules are still being imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.arg_groups.choices import (
    ATTENTION_BACKEND_CHOICES,
    DRAFT_ATTENTION_BACKEND_CHOICES,
    add_attention_backend_choices,
    add_draft_attention_backend_choices,
)
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, SRTPlatform

from sglang_dflow.cpu import PLATFORM_NAME

ATTENTION_BACKEND = PLATFORM_NAME
SPECULATIVE_ALGORITHMS = ("DFLASH", "DFLOW")

# Tokens of KV cache when neither --max-total-tokens nor --mem-fraction-static is given. The host's rule (a
# share of the device's memory) would take most of the machine's RAM, which here everything else lives in.
DEFAULT_MAX_TOTAL_TOKENS = 32_768
# Larger prefill chunks do not run faster on a CPU, and a chunk is the longest wait of every decoding request.
DEFAULT_CHUNKED_PREFILL_SIZE = 2_048
DEFAULT_MAX_RUNNING_REQUESTS = 64


class DFlowCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """An out-of-tree platform whose device is torch's own CPU, without the host's CPU kernels."""

    _enum = PlatformEnum.OOT
    device_name = PLATFORM_NAME
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        _add_choices()

    def get_device(self, device_id: int = 0) -> str:
        # The server arguments split this as a string when --device is not given; the host's CPU mixin returns
        # a torch.device there.
        return "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Set what has no other sensible value on this platform, and default what was not given."""
        # Not defaults: no other backends run here, and the host has already put its own choice in these fields.
        server_args.attention_backend = ATTENTION_BACKEND
        server_args.sampling_backend = "pytorch"
        server_args.lora_backend = "torch_native"
        server_args.cuda_graph_config = _graphs_off(server_args.cuda_graph_config)
        server_args.disable_custom_all_reduce = True
        if server_args.chunked_prefill_size is None:
            server_args.chunked_prefill_size = DEFAULT_CHUNKED_PREFILL_SIZE
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
        if server_args.max_total_tokens is None and server_args.mem_fraction_static is None:
            server_args.max_total_tokens = DEFAULT_MAX_TOTAL_TOKENS
        if server_args.dtype == "auto" and _checkpoint_dtype(server_args.model_path) == "float32":
            # The host's "auto" would serve it in fp16: slower here, and no longer exact.
            server_args.dtype = "float32"

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in SPECULATIVE_ALGORITHMS

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == ATTENTION_BACKEND

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        from sglang_dflow.cpu.cache_locs import extend_cache_locs

        return extend_cache_locs

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        # The host asks for every kind whatever the model is; MLA models are refused by the attention factory.
        if kind != "mha":
            return None
        from sglang_dflow.cpu.kv_pool import TorchMHATokenToKVPool

        return TorchMHATokenToKVPool

    def get_dispatch_key_name(self) -> str:
        return PLATFORM_NAME

    def get_compile_backend(self, mode: str | None = None) -> str:
        # The host decorates small functions with torch.compile; "eager" keeps a C++ compiler off the critical path.
        return "eager"

    def init_backend(self) -> None:
        """Called by the host once per worker process, while `model_runner` is imported."""
        torch.set_num_threads(default_num_threads())

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Called by the host once per loaded model, in the worker, after all of its modules are imported."""
        import sglang_dflow.cpu.attention  # noqa: F401  (importing it registers the backend)
        from sglang_dflow.cpu.fused_ops import register_fused_ops
        from sglang_dflow.cpu.hooks import install_cpu_hooks
        from sglang_dflow.cpu.linear import pack_linears

        _refuse_cuda_only_heads(model)
        install_cpu_hooks()
        register_fused_ops()
        _disable_triton_qk_norm_rope(model)
        pack_linears(model)

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU


def default_num_threads() -> int:
    """Return torch's intra-op thread count for a worker: `OMP_NUM_THREADS` when set, else the usable cores."""
    explicit = os.environ.get("OMP_NUM_THREADS")
    if explicit:
        return max(1, int(explicit))
    return max(1, len(os.sched_getaffinity(0)))


def _add_choices() -> None:
    """Make the backend's name a legal value of the two server arguments; idempotent."""
    if ATTENTION_BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([ATTENTION_BACKEND])
    if ATTENTION_BACKEND not in DRAFT_ATTENTION_BACKEND_CHOICES:
        add_draft_attention_backend_choices([ATTENTION_BACKEND])


def _checkpoint_dtype(model_path: str) -> str | None:
    """Return the floating-point type that a local checkpoint's config names; None when it cannot be read here."""
    config = Path(model_path) / "config.json"
    if not config.is_file():
        return None
    fields = json.loads(config.read_text())
    found = fields.get("dtype", fields.get("torch_dtype"))
    return found if isinstance(found, str) else None


def _graphs_off(config: Any) -> Any:
    """Return the graph configuration with every phase disabled."""
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    for phase in (Phase.DECODE, Phase.PREFILL):
        config = with_phase(config, phase, backend=Backend.DISABLED)
    return config


def _disable_triton_qk_norm_rope(model: torch.nn.Module) -> None:
    """Send draft attention to its torch path: the fused QK-norm + RoPE of `DFlashAttention` is a Triton kernel."""
    for module in model.modules():
        if hasattr(module, "use_table_qk_norm_rope"):
            module.use_table_qk_norm_rope = False


def _refuse_cuda_only_heads(model: torch.nn.Module) -> None:
    """Refuse drafters whose proposals are selected or verified by CUDA kernels, before the first request meets them."""
    heads = {"candidate_selector": "a DFlash2 selector", "lilicorr": "a LiLiCorr head"}
    for attribute, name in heads.items():
        if getattr(model, attribute, None) is not None:
            raise NotImplementedError(
                f"The {PLATFORM_NAME} platform does not serve drafters with {name}: its top-k and its sampled "
                "verification are CUDA kernels of the host. Serve this drafter on a GPU, or use a plain DFlash, "
                "DFlow or Domino drafter here."
            )
