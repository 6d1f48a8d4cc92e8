"""Variants of the demo drafter and the arms that serve them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflow.prompts import varied_prompts
from sglang_dflow.training.convert import convert_dflash_to_dflow, strip_relay
from sglang_dflow.training.drafter import Drafter
from tests.support.arms import Arm, ArmResult


@pytest.fixture(scope="session")
def dflash_drafter(drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same drafter without its relay: a plain DFlash checkpoint."""
    path = tmp_path_factory.mktemp("dflash") / "drafter"
    strip_relay(drafter, path)
    return path


@pytest.fixture(scope="session")
def zero_drafter(dflash_drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That plain DFlash checkpoint, converted: a zero relay."""
    path = tmp_path_factory.mktemp("zero") / "drafter"
    convert_dflash_to_dflow(dflash_drafter, path, relay_source="first_rejection", relay_hidden_size=64)
    return path


@pytest.fixture(scope="session")
def domino_drafter(drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drafter of the package with a random Domino head: quiet enough to be accepted, loud enough to be heard."""
    path = tmp_path_factory.mktemp("domino") / "drafter"
    plain = Drafter.load(drafter)
    torch.manual_seed(0)
    head = {"projector_type": "domino", "gru_hidden_dim": 64, "emb_dim": 48, "relay_rescore_size": 0}
    made = Drafter(dataclasses.replace(plain.config, **head))
    state = {name: value for name, value in plain.state_dict().items() if ".relay_rescore." not in name}
    missing, unexpected = made.load_state_dict(state, strict=False)
    assert not unexpected and all(name.startswith("domino.") for name in missing)
    assert made.domino is not None
    torch.nn.init.normal_(made.domino.embed_proj[2].weight, std=0.5)
    made.save(path, torch.float32)
    return path


@pytest.fixture(scope="session")
def tokenizer(target: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target)


@pytest.fixture(scope="session")
def prompts_ids(tokenizer: Any) -> list[list[int]]:
    """64 varied prompts, shuffled once so that a slice of them is varied too."""
    import random

    ids = [prompt.token_ids(tokenizer) for prompt in varied_prompts()]
    random.Random(0).shuffle(ids)
    return ids


@pytest.fixture(scope="session")
def run_arm(
    target: Path,
    prompts_ids: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, Arm], ArmResult]:
    """Run an arm once a session; the name is its identity."""
    results: dict[str, ArmResult] = {}

    def run(name: str, arm: Arm) -> ArmResult:
        if name not in results:
            print(f"\narm {name}")
            results[name] = arm.run(target, prompts_ids, tmp_path_factory.mktemp(name))
        return results[name]

    return run
