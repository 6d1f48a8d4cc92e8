"""cpu/platform.py: chosen only by its name, complete for the host's interface, modest defaults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sglang_dflow.cpu as cpu
from sglang_dflow.cpu.platform import (
    DEFAULT_MAX_TOTAL_TOKENS,
    DFlowCpuPlatform,
    default_num_threads,
)


def resolve_in_subprocess(platform: str | None) -> str:
    """Return the class name that the host resolves in a fresh process."""
    env = {name: value for name, value in os.environ.items() if name != "SGLANG_PLATFORM"}
    if platform is not None:
        env["SGLANG_PLATFORM"] = platform
    code = "from sglang.srt.platforms import current_platform; print(type(current_platform).__name__)"
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return run.stdout.strip().splitlines()[-1]


def test_answers_only_to_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed beside CUDA and not chosen, the platform must leave the host's own in place."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "SGLANG_ROPE_CACHE_FP32"):
        monkeypatch.delenv(name, raising=False)
    for value in ("", "cuda", "other"):
        monkeypatch.setenv("SGLANG_PLATFORM", value)
        assert cpu.activate() is None
    monkeypatch.delenv("SGLANG_PLATFORM")
    assert cpu.activate() is None
    assert "GOMP_SPINCOUNT" not in os.environ and "SGLANG_ROPE_CACHE_FP32" not in os.environ
    monkeypatch.setenv("SGLANG_PLATFORM", "dflow_cpu")
    # setenv first, so that monkeypatch takes back what activate() sets.
    monkeypatch.setenv("GOMP_SPINCOUNT", "")
    monkeypatch.setenv("SGLANG_ROPE_CACHE_FP32", "")
    del os.environ["GOMP_SPINCOUNT"], os.environ["SGLANG_ROPE_CACHE_FP32"]
    assert cpu.activate() == cpu.PLATFORM_CLASS
    assert os.environ["SGLANG_ROPE_CACHE_FP32"] == "1" and os.environ["GOMP_SPINCOUNT"] == cpu.GOMP_SPINCOUNT


def test_the_host_resolves_it_by_name_and_not_otherwise() -> None:
    assert resolve_in_subprocess("dflow_cpu") == "DFlowCpuPlatform"
    assert resolve_in_subprocess(None) != "DFlowCpuPlatform"


def arguments(**changes: Any) -> Any:
    """The fields that the defaults read and write, as they arrive from a command line without flags."""
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig

    fields = {
        "attention_backend": "intel_amx",  # the host's CPU default has been put here already
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "sampling_backend": None,
        "cuda_graph_config": CudaGraphConfig(),
        "disable_custom_all_reduce": False,
        "chunked_prefill_size": None,
        "max_running_requests": None,
        "max_total_tokens": None,
        "mem_fraction_static": None,
        "dtype": "auto",
        "model_path": "/nowhere",
    }
    return SimpleNamespace(**{**fields, **changes})


def test_defaults_fill_what_was_not_given() -> None:
    args = arguments()
    DFlowCpuPlatform().apply_server_args_defaults(args)
    assert args.attention_backend == "dflow_cpu"
    assert args.sampling_backend == "pytorch"
    assert args.max_total_tokens == DEFAULT_MAX_TOTAL_TOKENS
    assert args.dtype == "auto"
    assert args.cuda_graph_config.decode.backend == args.cuda_graph_config.prefill.backend == "disabled"


def test_defaults_respect_what_was_given() -> None:
    args = arguments(chunked_prefill_size=64, max_running_requests=3, max_total_tokens=100, dtype="bfloat16")
    DFlowCpuPlatform().apply_server_args_defaults(args)
    assert (args.chunked_prefill_size, args.max_running_requests, args.max_total_tokens) == (64, 3, 100)
    assert args.dtype == "bfloat16"
    args = arguments(mem_fraction_static=0.5)
    DFlowCpuPlatform().apply_server_args_defaults(args)
    assert args.max_total_tokens is None


@pytest.mark.parametrize(("stored", "served"), [("float32", "float32"), ("float16", "auto"), ("bfloat16", "auto")])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_fp32_checkpoints_stay_fp32(tmp_path: Path, key: str, stored: str, served: str) -> None:
    """The host's rule for `auto` halves fp32 checkpoints to fp16, which a CPU computes slowly and less exactly."""
    (tmp_path / "config.json").write_text(json.dumps({key: stored}))
    args = arguments(model_path=str(tmp_path))
    DFlowCpuPlatform().apply_server_args_defaults(args)
    assert args.dtype == served


def test_identity_and_capabilities() -> None:
    """No Triton, no graphs: the host must choose its torch paths."""
    platform = DFlowCpuPlatform()
    assert platform.is_out_of_tree() and not platform.is_cuda_alike()
    assert not platform.capabilities.supports_triton and not platform.capabilities.graph_capture
    assert platform.get_device() == "cpu"
    assert platform.supports_speculative_algorithm("DFLOW")
    assert not platform.supports_speculative_algorithm("EAGLE")
    assert platform.get_kv_pool_cls(kind="mla") is None


@pytest.mark.parametrize("head", ["candidate_selector", "lilicorr"])
def test_drafters_that_need_cuda_are_refused_at_load(head: str) -> None:
    """Otherwise the first request would end in a Triton error inside the scheduler."""
    model = torch.nn.Module()
    model.candidate_selector = model.lilicorr = None
    setattr(model, head, torch.nn.Identity())
    with pytest.raises(NotImplementedError, match="does not serve drafters with a .* Serve this drafter on a GPU"):
        DFlowCpuPlatform().post_load_model(model)


def test_the_backend_is_a_legal_choice_once() -> None:
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, DRAFT_ATTENTION_BACKEND_CHOICES

    DFlowCpuPlatform()
    DFlowCpuPlatform()
    assert ATTENTION_BACKEND_CHOICES.count("dflow_cpu") == 1
    assert DRAFT_ATTENTION_BACKEND_CHOICES.count("dflow_cpu") == 1


def test_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert default_num_threads() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert default_num_threads() == len(os.sched_getaffinity(0))
