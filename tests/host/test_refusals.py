"""A launch that DFLOW cannot serve stops before anything is forked: one message, expected value, remedy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sglang_dflow.checkpoint_files import read_tensors

ROOT = Path(__file__).parents[2]
Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


@dataclass(frozen=True)
class Refusal:
    """One launch: how the good drafter is spoiled, further arguments, and what the message must say."""

    words: str
    edit: Edit = lambda config, tensors: None
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    problems: int = 1


def _dflash(name: str, value: Any) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["dflash_config"][name] = value

    return edit


def _top(name: str, value: Any) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config[name] = value

    return edit


def _without(name: str) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for holder in (config, config["dflash_config"], tensors):
            holder.pop(name, None)

    return edit


def _plain_dflash(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del config["dflow_config"]
    config["architectures"] = ["DFlashDraftModel"]


def _misshaped(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["relay_mlp.2.weight"] = tensors["relay_mlp.2.weight"][:-1].contiguous()


def _two_faults(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    _misshaped(config, tensors)
    config["vocab_size"] = 1000


REFUSALS: dict[str, Refusal] = {
    "no drafter": Refusal("--speculative-draft-model-path is missing: .*sglang-dflow convert"),
    "plain DFlash": Refusal("plain DFlash checkpoint.*`sglang-dflow convert SRC DST`", _plain_dflash),
    "relay tensor missing": Refusal(
        r"relay_norm.bias is missing, expected shape \(576,\)", _without("relay_norm.bias")
    ),
    "relay tensor misshaped": Refusal(r"relay_mlp.2.weight has shape \(1151, \d+\), expected \(1152", _misshaped),
    "layers missing": Refusal("target_layer_ids is missing; the host would guess", _without("target_layer_ids")),
    "layers beyond": Refusal(r"target_layer_ids has \[30\], .*layers 0..29", _dflash("target_layer_ids", [1, 30])),
    "hidden size": Refusal("hidden_size is 960, but the target's is 576", _top("hidden_size", 960), problems=8),
    "vocabulary": Refusal("vocab_size is 1000, but the target's is 49152", _top("vocab_size", 1000)),
    "anchor layout": Refusal("sample_from_anchor is true: .*Use a drafter", _dflash("sample_from_anchor", True)),
    "two faults": Refusal("vocab_size is 1000(.|\n)*relay_mlp.2.weight", _two_faults, problems=2),
    "pipeline parallel": Refusal("--pp-size is 2, expected 1.*--tp-size", args=("--pp-size", "2")),
    "block size": Refusal(
        "block_size is 8, but --speculative-num-draft-tokens is 5", args=("--speculative-num-draft-tokens", "5")
    ),
    "switch": Refusal("SGLANG_DFLOW_RELAY is 'maybe', expected on or off", env={"SGLANG_DFLOW_RELAY": "maybe"}),
}

DECODE = ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake")
LORA = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj")
HOST_REFUSALS: dict[str, Refusal] = {
    "captured states without a draft": Refusal(
        "capture convention, got 'DFLOW'", args=("--enable-return-aux-hidden-states",)
    ),
    "LoRA beside a plan stream": Refusal(
        "LoRA .* does not support SGLANG_ENABLE_OVERLAP_PLAN_STREAM",
        args=LORA,
        env={"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"},
    ),
    "attention data parallel": Refusal(
        "DFLASH with dp attention requires CUDA or NPU", args=("--tp-size", "2", "--attn-dp-size", "2")
    ),
    "role switch": Refusal(
        "does not rebuild role-specific .*speculative decoding",
        args=(*DECODE, "--enable-pd-role-switch"),
    ),
}
"""What the host refuses in its own words: of DFLASH too, or of an algorithm that it does not name (host_sites.py)."""

ACCEPTED: dict[str, tuple[str, ...]] = {
    "good": (),
    "LoRA": LORA,
    "decode server": DECODE,
    "draft window": ("--speculative-draft-window-size", "16"),
    "data parallel": ("--dp-size", "2"),
}
"""Launches that are served: their tests are in tests/e2e."""


def _drafter(good: Path, edit: Edit, path: Path) -> Path:
    config = json.loads((good / "config.json").read_text())
    relay = {k: v for k, v in read_tensors(good).items() if k.startswith("relay_")}
    edit(config, relay)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(relay, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def outcomes(target: Path, drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Outcome of every launch, from one process."""
    scratch = tmp_path_factory.mktemp("drafters")
    commands = []
    accepted = {name: Refusal("", args=args) for name, args in ACCEPTED.items()}
    launches = {**REFUSALS, **HOST_REFUSALS, **accepted}
    for name, refusal in launches.items():
        argv = ["--model-path", str(target), "--device", "cpu", "--speculative-algorithm", "DFLOW", *refusal.args]
        if name != "no drafter":
            path = _drafter(drafter, refusal.edit, scratch / name.replace(" ", "-"))
            argv += ["--speculative-draft-model-path", str(path)]
        commands.append({"argv": argv, "env": refusal.env})
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.try_launches"],
        input=json.dumps(commands),
        env={**os.environ, "SGLANG_PLATFORM": "dflow_cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [json.loads(line[7:]) for line in run.stdout.splitlines() if line.startswith("LAUNCH ")]
    assert len(lines) == len(commands), run.stdout[-2000:] + run.stderr[-2000:]
    return dict(zip(launches, lines))


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    """With the good drafter alone: otherwise the refusals below would prove nothing."""
    assert outcomes[name] == {"error": None, "message": ""}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_one_message(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    """Each fault is named, alone, with its remedy."""
    refusal, outcome = REFUSALS[name], outcomes[name]
    assert outcome["error"] == "ValueError", outcome
    assert re.search(refusal.words, outcome["message"]), outcome["message"]
    assert f"{refusal.problems} problem(s)" in outcome["message"]


@pytest.mark.parametrize("name", HOST_REFUSALS)
def test_refused_by_the_host(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    """Fails when the host starts to accept DFLOW here: then the feature must be tested, or refused by us."""
    assert outcomes[name]["error"] == "ValueError", outcomes[name]
    assert re.search(HOST_REFUSALS[name].words, outcomes[name]["message"], re.DOTALL)


def test_wrong_host_version_stops_a_real_launch(target: Path, drafter: Path, tmp_path: Path) -> None:
    """The host's plugin loader swallows exceptions, so the refusal must come from the algorithm itself."""
    fake = tmp_path / "sglang-0.5.99.dist-info"
    fake.mkdir()
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.99\n")
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(target), "--device", "cpu"]
    argv += ["--speculative-algorithm", "DFLOW", "--speculative-draft-model-path", str(drafter)]
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    env = {**os.environ, "SGLANG_PLATFORM": "dflow_cpu", "PYTHONPATH": path}
    run = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode != 0
    last = run.stderr.strip().splitlines()[-1]
    assert (
        "DFLOW cannot start: sglang is 0.5.99, but this sglang-dflow was written and tested for exactly 0.5.23" in last
    )
    assert "pip install 'sglang==0.5.23'" in last
