"""cpu/hooks.py in a process of its own: every record applies to the installed host and does what it says."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from sglang_dflow.cpu.hooks import CPU_HOOKS
from sglang_dflow.hooks.record import fingerprint, install_all

# Installed once, then asked; each fact is one key of the printed object.
PROBE = textwrap.dedent(
    """
    import json
    from types import SimpleNamespace

    import torch
    from sglang.srt.mem_cache import allocation
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative import dflash_utils, dflash_worker_v2, domino_utils
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    from sglang_dflow.cpu.cache_locs import assign_req_to_token_pool
    from sglang_dflow.cpu.hooks import install_cpu_hooks
    from sglang_dflow.cpu.linear import PackedHeadMethod
    from sglang_dflow.cpu.sampling import compute_sampled_accept_and_bonus

    facts = {}

    def raises(call):
        try:
            call()
        except Exception as error:
            return type(error).__name__
        return ""

    stream = torch.get_device_module("cpu").current_stream()
    tensor = torch.zeros(2)
    facts["record_stream_before"] = raises(lambda: tensor.record_stream(stream))
    facts["verify_before"] = dflash_utils.is_dflash_sampling_verify_available()
    install_cpu_hooks()
    install_cpu_hooks()
    facts["record_stream_after"] = raises(lambda: tensor.record_stream(stream))
    facts["assign"] = [
        module.assign_req_to_token_pool_func is assign_req_to_token_pool for module in (allocation, dflash_worker_v2)
    ]
    facts["last_loc"] = allocation.get_last_loc is allocation.get_last_loc_torch
    facts["verify_after"] = dflash_worker_v2.is_dflash_sampling_verify_available()
    facts["verify"] = [
        module.compute_dflash_sampling_correct_drafts_and_bonus is compute_sampled_accept_and_bonus
        for module in (dflash_utils, dflash_worker_v2)
    ]

    def domino(tables=torch.float32, head=torch.float32, rows=4, **changed):
        nn = torch.nn
        checks = dict(
            tp_size=1, tp_rank=0, target_vocab_size=4, draft_vocab_size=4, hidden_size=2,
            target_embedding=nn.Embedding(4, 2, dtype=tables), lm_head=nn.Embedding(rows, 2, dtype=tables),
            prefix_gru=nn.GRU(2, 3, bias=False, dtype=head),
            embed_proj=nn.Sequential(
                nn.Linear(5, 2, bias=False, dtype=head), nn.SiLU(), nn.Linear(2, 4, bias=False, dtype=head)
            ),
        )
        try:
            dflash_worker_v2.validate_domino_runtime(device=torch.device("cpu"), **(checks | changed))
        except ValueError as error:
            return str(error)
        return ""

    bf16, fp32 = torch.bfloat16, torch.float32
    facts["domino"] = {
        "fp32": domino(), "bf16": domino(bf16, bf16), "mixed": domino(fp32, bf16), "fp16": domino(head=torch.float16),
        "tp": domino(tp_size=0), "rows": domino(rows=3), "gru": domino(prefix_gru=torch.nn.GRU(9, 3, bias=False)),
        "missing": domino(lm_head=object()),
    }

    runner = SimpleNamespace(dtype=torch.float32, is_generation=True, _pp_kwargs=lambda proxies: {})
    batch = SimpleNamespace(input_embeds=torch.ones(1, 2) / 3, replace_embeds=None, replace_positions=None)
    embeds = ModelRunner._extend_forward_kwargs(runner, batch, None)["input_embeds"]
    facts["embeds_exact"] = bool(torch.equal(embeds, batch.input_embeds))

    class Head(torch.nn.Module):
        pass

    head = Head()
    head.weight = torch.nn.Parameter(torch.randn(64, 8), requires_grad=False)
    head.weight[60:] = 100.0  # padding rows of the vocabulary: must never win
    head.quant_method = PackedHeadMethod()
    head.org_vocab_size = 60
    head.shard_indices = SimpleNamespace(num_org_elements=60, num_added_elements=0)
    hidden = torch.randn(7, 8).abs()
    found = DFlashWorkerV2._greedy_sample_from_vocab_parallel_head(None, hidden_states=hidden, lm_head=head)
    facts["draft_head"] = found.tolist() == (hidden @ head.weight[:60].T).argmax(-1).tolist()
    print(json.dumps(facts))
    """
)


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """What a worker process of the platform sees before and after the hooks are installed."""
    run = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, "SGLANG_PLATFORM": "dflow_cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return found


def test_record_stream_of_cpu_tensors(facts: dict[str, Any]) -> None:
    """The first assertion fails when torch accepts CPU tensors: then the record can go."""
    assert facts["record_stream_before"]
    assert not facts["record_stream_after"]


def test_slot_assignment_is_replaced_wherever_it_was_imported(facts: dict[str, Any]) -> None:
    assert all(facts["assign"])


def test_last_slots_of_pages_are_found_in_torch(facts: dict[str, Any]) -> None:
    assert facts["last_loc"]


def test_sampled_verification_is_available_and_ours(facts: dict[str, Any]) -> None:
    """The first assertion fails when the host brings its own: then the record can go."""
    assert not facts["verify_before"]
    assert facts["verify_after"] and all(facts["verify"])


def test_domino_keeps_every_check_but_device_and_one_type(facts: dict[str, Any]) -> None:
    """A server in one of two types passes; whatever else the host refuses, in float32 too, is refused in its words."""
    found = facts["domino"]
    assert (found["fp32"], found["bf16"]) == ("", "")
    assert all("requires BF16" in found[case] for case in ("mixed", "fp16"))
    assert found["tp"] == "DFLASH Domino requires TP>=1, got TP=0."
    assert "lm_head row count must equal" in found["rows"]
    assert "GRU input size does not match" in found["gru"]
    assert "requires target embedding and lm_head weight tensors" in found["missing"]


def test_embeddings_keep_their_precision(facts: dict[str, Any]) -> None:
    assert facts["embeds_exact"]


def test_draft_head_ignores_the_padded_vocabulary(facts: dict[str, Any]) -> None:
    assert facts["draft_head"]


@pytest.mark.parametrize("record", CPU_HOOKS, ids=lambda record: record.name)
def test_fingerprint_is_of_the_installed_host(record: Any) -> None:
    """Fails with the record's name when SGLang moves."""
    assert fingerprint(record.target) == record.fingerprint


def test_another_host_is_refused_before_anything_is_installed() -> None:
    """The message names record, target and both fingerprints."""
    installed: list[str] = []
    good = dataclasses.replace(CPU_HOOKS[0], install=lambda: installed.append("good"))
    moved = dataclasses.replace(CPU_HOOKS[1], fingerprint="0" * 16)
    with pytest.raises(RuntimeError, match=f"{moved.name}.*expected {'0' * 16}"):
        install_all((good, moved))
    assert not installed
