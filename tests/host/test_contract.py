"""What we rely on in SGLang 0.5.23: fails with names when the host moves."""

from __future__ import annotations

import inspect

import pytest
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_dflow.algorithm import NAME, DFlowAlgorithm
from sglang_dflow.compat import HOST_VERSION, installed_host_version
from sglang_dflow.cpu.hooks import CPU_HOOKS
from sglang_dflow.hooks import HOOKS
from sglang_dflow.hooks.ledger import LEDGER, render
from sglang_dflow.hooks.record import fingerprint
from sglang_dflow.serving.draft_model import RelayMixin
from sglang_dflow.serving.worker import DFlowWorker

_WORKER = "sglang.srt.speculative.dflash_worker_v2"
OVERRIDDEN = {
    f"{_WORKER}:_resolve_dflash_embedding_module": "d3413dc05317a60d",
    f"{_WORKER}:DFlashWorkerV2.__init__": "94c547064b014564",
    f"{_WORKER}:DFlashWorkerV2.alloc_memory_pool": "9bd919b25432335e",
    f"{_WORKER}:DFlashWorkerV2.forward_batch_generation": "f42a3bb18adba2a5",
    f"{_WORKER}:DFlashWorkerV2._accept_block": "d06ac1b8f8de12b1",
    f"{_WORKER}:DFlashWorkerV2._maybe_build_draft_sampler": "30ca5a29abd955db",
    f"{_WORKER}:DFlashWorkerV2._greedy_sample_from_vocab_parallel_head": "a576d9f68d835316",
    f"{_WORKER}:_DflashDraftSampler": "a5f258810c2b814c",
    f"{_WORKER}:DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc": "fae12d81a6e1bb85",
    f"{_WORKER}:DFlashWorkerV2.clear_cache_pool": "9e451b5b28a83237",
    "sglang.srt.speculative.draft_worker_common:make_draft_sampler_capture_hook": "8975e917a66abeb0",
    "sglang.srt.speculative.spec_registry:CustomSpecAlgo": "a8bd6ed46a3afdc3",
    "sglang.srt.models.dflash:DFlashDraftModel.__init__": "a64cd53389a326f7",
    "sglang.srt.models.dflash:DFlash2DraftModel": "250b414751627cef",
    "sglang.srt.models.dflash:DFlashDraftModel.project_target_hidden": "59a15bcf635c6844",
    "sglang.srt.models.dflash:DFlashDraftModel.forward": "8064c02b39e05506",
    "sglang.srt.models.dflash:DFlashDraftModel.load_weights": "47b40b19d319919a",
    "sglang.srt.arg_groups.speculative_hook:_handle_dflash": "12b1b03eca9f51ca",
    "sglang.srt.managers.overlap_utils:FutureMap.__init__": "16a3717abc852597",
    "sglang.srt.managers.auxiliary_output:DeviceAuxiliaryOutput": "a62c7fa9b38dc93d",
    "sglang.srt.managers.auxiliary_output:HostAuxiliaryOutput": "10c5710988567966",
    "sglang.srt.managers.utils:GenerationBatchResult.copy_auxiliary_output_to_cpu": "6db70e284df78349",
    "sglang.srt.managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor"
    ".consume_auxiliary_output": "16d532b5caa23ba7",
    "sglang.srt.managers.scheduler_components.output_streamer:_GenerationStreamAccumulator.accept": "8137d1ccc48792a7",
    "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
    ".update_weights_from_disk": "7dea681e1eed3a25",
    "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
    ".update_weights_from_ipc": "16d1756a77e45afb",
    # The draft worker is made before the KV cache is sized, and the request pool keeps to --max-running-requests.
    "sglang.srt.managers.scheduler:Scheduler.init_model_worker": "450aebf5b90767f5",
    "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator.resolve_max_num_reqs": "8f54d8945c2fd37a",
    "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._build_req_to_token_pool": "7bc5ee750f714da3",
    # On a decode server every request, new or resumed, gets its first draft input here, after a wait for all forwards.
    "sglang.srt.disaggregation.decode:SchedulerDisaggregationDecodeMixin._get_new_prebuilt_batch": "b51d6b336384200f",
    "sglang.srt.disaggregation.decode_schedule_batch_mixin:ScheduleBatchDisaggregationDecodeMixin"
    ".process_prebuilt": "735ddcdc5bcd9568",
    "sglang.srt.speculative.spec_info:SpeculativeAlgorithm.build_disagg_draft_input": "b2987268c6c638b5",
}
"""Host code that we override or call, and the fingerprint it had when that was written."""


def _interface(cls: type) -> set[str]:
    # `vars`, not `dir`: EnumMeta hides instance methods from dir().
    return {name for name, value in vars(cls).items() if inspect.isfunction(value) and not name.startswith("_")}


def test_host_is_the_pinned_one() -> None:
    assert installed_host_version() == HOST_VERSION


def test_dflow_has_the_whole_interface_of_the_host_enum() -> None:
    """The host's own guard compares `is_*` and `supports_*` only; every public method can be called on us."""
    missing = _interface(SpeculativeAlgorithm) - {name for name in dir(DFlowAlgorithm)}
    assert missing == set()


def test_supplements_are_still_needed() -> None:
    """The methods that CustomSpecAlgo lacks: when the host adds one, ours should call super or go."""
    lacking = _interface(SpeculativeAlgorithm) - set(dir(CustomSpecAlgo))
    assert lacking == {"carries_draft_hidden_states", "create_future_map", "get_platform_worker_cls", "need_topk"}


def test_answers_are_those_of_dflash() -> None:
    """Every parameterless question of the host gets the answer that DFLASH gets."""
    ours = DFlowAlgorithm(NAME, lambda server_args: object, supports_overlap=True)
    asked = 0
    for name in sorted(_interface(SpeculativeAlgorithm)):
        if not name.startswith(("is_", "supports_", "has_", "need_", "carries_")):
            continue
        assert getattr(ours, name)() == getattr(SpeculativeAlgorithm.DFLASH, name)(), name
        asked += 1
    assert asked >= 20


@pytest.mark.parametrize("target", sorted(OVERRIDDEN))
def test_overridden_host_code_is_unchanged(target: str) -> None:
    """Names the host method that changed since we overrode it: read its diff before taking the new fingerprint."""
    assert fingerprint(target) == OVERRIDDEN[target]


def test_every_override_is_fingerprinted() -> None:
    """An override added without a fingerprint would not be watched."""
    listed = {target.split(":")[1] for target in OVERRIDDEN}
    for ours, host in ((DFlowWorker, DFlashWorkerV2), (RelayMixin, DFlashDraftModel)):
        for name in vars(ours):
            if inspect.isfunction(vars(ours)[name]) and name in vars(host):
                assert f"{host.__name__}.{name}" in listed


@pytest.mark.parametrize("record", [*HOOKS, *CPU_HOOKS], ids=lambda record: record.name)
def test_hook_target_is_unchanged(record) -> None:
    assert fingerprint(record.target) == record.fingerprint
    assert record.host_version == HOST_VERSION
    assert record.why and record.how and record.tried and record.upstream and record.remove_when and record.test


def test_hook_names_are_unique() -> None:
    names = [record.name for record in (*HOOKS, *CPU_HOOKS)]
    assert len(set(names)) == len(names)


def test_ledger_is_generated() -> None:
    """`make ledger` was run after the last change of a record."""
    assert LEDGER.read_text() == render()
