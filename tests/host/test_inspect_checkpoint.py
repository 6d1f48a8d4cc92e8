"""`sglang-dflow inspect` gives the verdict that a launch gives."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import save_file

from sglang_dflow.checkpoint_files import read_tensors
from sglang_dflow.inspect_checkpoint import inspect_checkpoint
from sglang_dflow.serving.launch_checks import drafter_problems

EDITS: dict[str, dict[str, Any]] = {
    "good": {},
    "plain": {"architectures": ["DFlashDraftModel"], "dflow_config": None},
    "target": {"hidden_size": 960, "vocab_size": 100, "num_target_layers": 12},
    "layers": {"dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 30]}},
    "anchor layout": {"dflash_config": {"mask_token_id": 4, "target_layer_ids": [1], "sample_from_anchor": True}},
    "relay": {"dflow_config": {"relay_source": "first_rejection", "relay_hidden_size": 10, "relay_activation": "silu"}},
    "relay fields": {"dflow_config": {"relay_source": "all", "relay_hidden_size": 0, "future": 1}},
}


@pytest.mark.parametrize("name", EDITS)
def test_verdict_is_the_launchs(name: str, target: Path, drafter: Path, tmp_path: Path) -> None:
    """Catches a check that one of the two lost: a drafter that `inspect` passes and a launch refuses."""
    config = json.loads((drafter / "config.json").read_text()) | EDITS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(read_tensors(drafter), tmp_path / "model.safetensors")
    server_args = SimpleNamespace(
        speculative_draft_model_path=str(tmp_path), speculative_draft_model_revision=None, model_path=str(target),
        trust_remote_code=False, revision=None, speculative_num_draft_tokens=None, speculative_dflash_block_size=None,
    )  # fmt: skip
    launch = [problem.removeprefix(f"drafter {tmp_path}: ") for problem in drafter_problems(server_args)]
    found = inspect_checkpoint(tmp_path, target).problems
    assert set(launch) <= set(found)
    # What only the loading of the weights would tell comes on top, and only where config and tensors disagree.
    assert all("fc.weight" in problem for problem in set(found) - set(launch))
    assert bool(launch) is bool(found) is (name != "good")
