"""Run-time hooks of the CPU platform: every host function that has no seam and launches a CUDA or Triton kernel.

Installed once per worker process, after the first model is loaded (`DFlowCpuPlatform.post_load_model`), and only when
the platform is active. The DFLASH worker imports most of these functions by name, so a replacement is bound in every
host module that holds the original.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from sglang_dflow.compat import HOST_VERSION
from sglang_dflow.cpu.cache_locs import assign_req_to_token_pool
from sglang_dflow.cpu.sampling import compute_sampled_accept_and_bonus
from sglang_dflow.hooks.record import HookRecord, install_all


def rebind(original: Any, replacement: Any) -> int:
    """Replace `original` by `replacement` in every loaded host module that holds it; return how many names changed."""
    changed = 0
    for module_name, module in list(sys.modules.items()):
        if module is None or not module_name.startswith("sglang."):
            continue
        for name, value in list(vars(module).items()):
            if value is original:
                setattr(module, name, replacement)
                changed += 1
    return changed


def _install_assign_req_to_token_pool() -> None:
    # Imported first: a module that is loaded later would bind the original by name.
    import sglang.srt.speculative.dflash_worker_v2  # noqa: F401
    from sglang.srt.mem_cache import allocation

    rebind(allocation.assign_req_to_token_pool_func, assign_req_to_token_pool)


def _install_last_loc() -> None:
    from sglang.srt.mem_cache import allocation

    rebind(allocation.get_last_loc, allocation.get_last_loc_torch)


def _install_record_stream() -> None:
    if getattr(torch.Tensor.record_stream, "_dflow_cpu", False):
        return
    original: Callable[..., None] = torch.Tensor.record_stream

    @functools.wraps(original)
    def record_stream(self: torch.Tensor, stream: Any) -> None:
        # A CPU tensor has no stream that could still be reading it.
        if self.device.type != "cpu":
            original(self, stream)

    record_stream._dflow_cpu = True  # type: ignore[attr-defined]
    torch.Tensor.record_stream = record_stream


def _install_sampled_verify() -> None:
    import sglang.srt.speculative.dflash_worker_v2  # noqa: F401
    from sglang.srt.speculative import dflash_utils

    rebind(dflash_utils.compute_dflash_sampling_correct_drafts_and_bonus, compute_sampled_accept_and_bonus)
    dflash_utils._DFLASH_SAMPLING_VERIFY_AVAILABLE = True


class _ReportsBf16:
    """A module as the original check sees it: everything is the module's own, its tensors report bfloat16."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return found.to("meta", torch.bfloat16) if isinstance(found, torch.Tensor) else found


def _is_float32(target_embedding: Any, lm_head: Any, prefix_gru: Any, embed_proj: Any) -> bool:
    """Whether all weights that the original wants in bfloat16 are float32; a mixture is left to the original."""
    head = [prefix_gru.weight_ih_l0, prefix_gru.weight_hh_l0, embed_proj[0].weight, embed_proj[2].weight]
    weights = [getattr(target_embedding, "weight", None), getattr(lm_head, "weight", None), *head]
    return all(weight is not None and weight.dtype == torch.float32 for weight in weights)


def _install_domino_validation() -> None:
    import sglang.srt.speculative.dflash_worker_v2  # noqa: F401
    from sglang.srt.speculative import domino_utils

    original = domino_utils.validate_domino_runtime

    @functools.wraps(original)
    def validate_domino_runtime(*, device: torch.device, **checks: Any) -> None:
        # Every other check of the original stays; its device check is answered for it, and so is its type check for
        # a server that is float32 throughout (bit-stable comparisons): the rollout is plain torch in any one type.
        if device.type == "cpu":
            device = torch.device("cuda")
            modules = {name: checks[name] for name in ("target_embedding", "lm_head", "prefix_gru", "embed_proj")}
            if _is_float32(**modules):
                projections = [_ReportsBf16(module) for module in modules.pop("embed_proj")]
                checks |= {name: _ReportsBf16(module) for name, module in modules.items()}
                checks["embed_proj"] = projections
        original(device=device, **checks)

    rebind(original, validate_domino_runtime)


def _install_input_embeds_dtype() -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    original = ModelRunner._extend_forward_kwargs

    @functools.wraps(original)
    def extend_forward_kwargs(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = original(self, forward_batch, *args, **kwargs)
        if forward_batch.input_embeds is not None and forward_batch.replace_embeds is None:
            prepared["input_embeds"] = forward_batch.input_embeds.to(self.dtype)
        return prepared

    ModelRunner._extend_forward_kwargs = extend_forward_kwargs


def _install_draft_head() -> None:
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    from sglang_dflow.cpu.linear import PackedHeadMethod

    original = DFlashWorkerV2._greedy_sample_from_vocab_parallel_head

    @functools.wraps(original)
    def greedy_sample(self: Any, *, hidden_states: torch.Tensor, lm_head: Any, **kwargs: Any) -> torch.Tensor:
        method = getattr(lm_head, "quant_method", None)
        shard = getattr(lm_head, "shard_indices", None)
        whole = shard is not None and shard.num_org_elements == lm_head.org_vocab_size and not shard.num_added_elements
        if not (whole and isinstance(method, PackedHeadMethod)):
            return original(self, hidden_states=hidden_states, lm_head=lm_head, **kwargs)
        logits = method.apply(lm_head, hidden_states)  # [rows, padded vocabulary]
        return torch.argmax(logits[:, : lm_head.org_vocab_size], dim=-1)

    DFlashWorkerV2._greedy_sample_from_vocab_parallel_head = greedy_sample


def _install_draft_graph() -> None:
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    from sglang_dflow.cpu.graph_runner import install_draft_graph_runner

    original = DFlashWorkerV2.init_cuda_graphs

    @functools.wraps(original)
    def init_cuda_graphs(self: Any) -> None:
        original(self)
        install_draft_graph_runner(self)

    DFlashWorkerV2.init_cuda_graphs = init_cuda_graphs


def _install_all_gather() -> None:
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    original = GroupCoordinator.all_gather_into_tensor

    @functools.wraps(original)
    def all_gather_into_tensor(self: Any, output: torch.Tensor, input: torch.Tensor) -> None:
        if output.is_cpu:
            self._all_gather_into_tensor(output, input)
        else:
            original(self, output, input)

    GroupCoordinator.all_gather_into_tensor = all_gather_into_tensor


class _Pageable(torch.overrides.TorchFunctionMode):
    """Inside, memory that is asked for pinned is ordinary memory: nothing is copied to a device from it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def _install_lora_memory() -> None:
    from sglang.srt.lora.lora_manager import LoRAManager

    def pageable(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _Pageable():
                return original(*args, **kwargs)

        return call

    LoRAManager.__init__ = pageable(LoRAManager.__init__)
    LoRAManager.prepare_lora_batch = pageable(LoRAManager.prepare_lora_batch)


CPU_HOOKS: tuple[HookRecord, ...] = (
    HookRecord(
        name="cpu-assign-req-to-token-pool",
        target="sglang.srt.mem_cache.allocation:assign_req_to_token_pool_func",
        host_version=HOST_VERSION,
        fingerprint="fdbe87d4a60cc13a",
        why="allocating the slots of a speculative round launches a Triton kernel; there is no Triton driver here",
        how="replaces the function by torch indexing of the same contract",
        tried="PlatformCapabilities(supports_triton=False): the function does not ask; no platform factory for it",
        upstream="none yet: get_speculative_cache_locs_fn could cover this twin as well",
        remove_when="the host asks capabilities.supports_triton or a platform factory here",
        test="tests/host/test_cpu_hooks.py, tests/unit/test_cpu_cache_locs.py",
        install=_install_assign_req_to_token_pool,
    ),
    HookRecord(
        name="cpu-last-loc",
        target="sglang.srt.mem_cache.allocation:get_last_loc",
        host_version=HOST_VERSION,
        fingerprint="b14bba7a1b96ac12",
        why="with a page size above 1 every allocation launches a Triton kernel, chosen by a list of backend names",
        how="binds the host's own torch twin, get_last_loc_torch, in its place",
        tried="PlatformCapabilities(supports_triton=False) and support_triton() of the backend: neither is asked here",
        upstream="none yet",
        remove_when="get_last_loc asks capabilities.supports_triton, as the paged allocator beside it does",
        test="tests/host/test_cpu_hooks.py",
        install=_install_last_loc,
    ),
    HookRecord(
        name="cpu-record-stream",
        target="sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2.forward_batch_generation",
        host_version=HOST_VERSION,
        fingerprint="f42a3bb18adba2a5",
        why="the worker calls batch.seq_lens.record_stream(..), which torch refuses for CPU tensors",
        how="makes Tensor.record_stream return at once for CPU tensors, in this process",
        tried="overriding the method: it is 679 lines and the call is in the middle; the host's overlap_utils guards "
        "the same call by device, this one does not",
        upstream="none yet: the guard of overlap_utils belongs here too",
        remove_when="DFlashWorkerV2 guards the call by device",
        test="tests/host/test_cpu_hooks.py",
        install=_install_record_stream,
    ),
    HookRecord(
        name="cpu-sampled-verify",
        target="sglang.srt.speculative.dflash_utils:compute_dflash_sampling_correct_drafts_and_bonus",
        host_version=HOST_VERSION,
        fingerprint="91c0eb0372089e6c",
        why="without CUDA kernels the worker decodes temperature > 0 greedily: another distribution than requested",
        how="replaces the function by the torch verification of cpu/sampling.py and reports it as available",
        tried="the kernel slot verify_sampling.tree_speculative_sampling_target_only: filling it makes the host's own "
        "code run, which reads tensors on the host and leaves min-p out",
        upstream="none yet",
        remove_when="the host brings a torch fallback for sampled verification, min-p included",
        test="tests/unit/test_cpu_sampling.py, tests/host/test_cpu_hooks.py",
        install=_install_sampled_verify,
    ),
    HookRecord(
        name="cpu-domino-validation",
        target="sglang.srt.speculative.domino_utils:validate_domino_runtime",
        host_version=HOST_VERSION,
        fingerprint="969cb573dd07c05a",
        why="Domino drafters are refused off CUDA and outside bfloat16, though their rollout is plain torch",
        how="answers the device check and, where all weights are float32, the type check; leaves all other checks to "
        "the original",
        tried="no seam: the worker's constructor calls it unconditionally",
        upstream="none yet",
        remove_when="validate_domino_runtime asks for what it needs instead of a device name and a type",
        test="tests/host/test_cpu_hooks.py, tests/host/test_parity.py",
        install=_install_domino_validation,
    ),
    HookRecord(
        name="cpu-input-embeds-dtype",
        target="sglang.srt.model_executor.model_runner:ModelRunner._extend_forward_kwargs",
        host_version=HOST_VERSION,
        fingerprint="2fb8dbbf8d795a06",
        why="the host casts input embeddings to bfloat16 whatever the model's type is; an fp32 drafter then fails in "
        "its first linear layer (mat1 and mat2 must have the same dtype)",
        how="casts to the runner's own dtype instead, after the original has run",
        tried="casting in the draft model: DFLASH serves the host's own draft class, whose forward has no seam",
        upstream="none yet",
        remove_when="the host casts input_embeds to the model's dtype",
        test="tests/host/test_cpu_hooks.py",
        install=_install_input_embeds_dtype,
    ),
    HookRecord(
        name="cpu-draft-head",
        target="sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2._greedy_sample_from_vocab_parallel_head",
        host_version=HOST_VERSION,
        fingerprint="a576d9f68d835316",
        why="the drafts' argmax multiplies by the head's dense weight, a fifth of a speculative round here; the packed "
        "weight of cpu/linear.py takes half to a third of that time",
        how="asks the head's own method for the logits when one rank holds the whole vocabulary, else the original",
        tried="PackedHeadMethod alone: the logits processor asks the head's method, this function reads lm_head.weight",
        upstream="none yet",
        remove_when="the function asks lm_head.quant_method as LogitsProcessor does, or packing is removed",
        test="tests/host/test_cpu_hooks.py",
        install=_install_draft_head,
    ),
    HookRecord(
        name="cpu-draft-graph",
        target="sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2.init_cuda_graphs",
        host_version=HOST_VERSION,
        fingerprint="63c10712f6a17fd4",
        why="the draft forward, the relay in it, would never run as a graph without a GPU: what a CUDA graph breaks "
        "would not show in any test here",
        how="after the original has run, puts cpu/graph_runner.py where the draft runner looks for its extend graph",
        tried="PlatformCapabilities(graph_capture=True) with get_graph_runner_cls(): on a CPU device the host captures "
        "only under --enable-torch-compile and replays only plain decoding (`is_cpu_graph`), never a draft block",
        upstream="none yet",
        remove_when="capture_decode_graph and _forward_raw ask the platform instead of the device's name",
        test="tests/host/test_cpu_graph_runner.py, tests/e2e/test_exactness.py",
        install=_install_draft_graph,
    ),
    HookRecord(
        name="cpu-all-gather",
        target="sglang.srt.distributed.parallel_state:GroupCoordinator.all_gather_into_tensor",
        host_version=HOST_VERSION,
        fingerprint="6c3b3198a56c4901",
        why="tensor parallel: unless the host runs its own CPU engine it gathers by an operator that is registered for "
        "CUDA alone, and the first draft of two ranks ends in NotImplementedError",
        how="calls the operator's own function for CPU tensors, as the host's CPU engine does",
        tried="no seam: the method asks the module's `_is_cpu`, which is the host's own engine (SGLANG_USE_CPU_ENGINE)",
        upstream="none yet",
        remove_when="the method asks the tensor or the platform",
        test="tests/e2e/test_tensor_parallel.py",
        install=_install_all_gather,
    ),
    HookRecord(
        name="cpu-lora-memory",
        target="sglang.srt.lora.lora_manager:LoRAManager.prepare_lora_batch",
        host_version=HOST_VERSION,
        fingerprint="75d832c03b74846a",
        why="the layers and the torch backend of LoRA pin host memory without asking the platform, which raises where "
        "there is no accelerator",
        how="makes pinned memory ordinary memory while a LoRAManager is made and while it prepares a batch",
        tried="is_pin_memory_available of the platform: the memory pool asks it, lora/layers.py and "
        "lora/backend/torch_backend.py do not; a backend of our own in the host's registry would leave the layers",
        upstream="none yet",
        remove_when="lora/layers.py and the torch_native backend ask is_pin_memory_available",
        test="tests/e2e/test_lora.py",
        install=_install_lora_memory,
    ),
)


@functools.cache
def install_cpu_hooks() -> None:
    """Verify every record against the installed host and install all of them; once per process.

    Raises:
        RuntimeError: the host's source differs from what the records were written for.
    """
    install_all(CPU_HOOKS)
