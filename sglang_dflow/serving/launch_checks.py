"""Everything that stops a DFLOW launch, gathered into one message before any process is forked.

Reads the resolved server arguments, the drafter's `config.json` and tensor headers, and the target's configuration
through the host's own reader. A drafter named by a hub id has no local tensor headers yet; its relay tensors are
checked by the draft model when they are loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PretrainedConfig

from sglang_dflow.config import (
    RELAY_PREFIXES,
    DFlowConfig,
    checkpoint_problems,
    raise_problems,
    target_problems,
    tensor_problems,
)
from sglang_dflow.serving.settings import RelaySettings


def check_launch(server_args: Any) -> None:
    """Check switches, flags, drafter and target of a launch.

    Raises:
        ValueError: all problems, each with what was expected and what to do.
    """
    problems = switch_problems() + flag_problems(server_args)
    if server_args.speculative_draft_model_path is not None:
        problems += drafter_problems(server_args)
    raise_problems(problems, where="these server arguments")


def switch_problems() -> list[str]:
    """Return what is wrong with the environment switches."""
    try:
        RelaySettings.from_env()
    except ValueError as error:
        return [str(error)]
    return []


def flag_problems(server_args: Any) -> list[str]:
    """Return the flags that DFLOW needs and lacks, or has and cannot honour."""
    problems = []
    if server_args.speculative_draft_model_path is None:
        problems.append(
            "--speculative-draft-model-path is missing: name a DFlow drafter (a directory or a hub id); "
            "`sglang-dflow convert` makes one of a DFlash drafter"
        )
    if server_args.pp_size != 1:
        problems.append(
            f"--pp-size is {server_args.pp_size}, expected 1: the drafter needs the captured states of all target "
            "layers on one stage. Use --tp-size instead"
        )
    if server_args.enable_linear_replayssm_spec:
        problems.append(
            "--enable-linear-replayssm-spec is accepted by the host for DFLASH and DSPARK by name only. Drop the flag, "
            "or use --speculative-algorithm DFLASH"
        )
    return problems


def drafter_problems(server_args: Any) -> list[str]:
    """Return what is wrong with the drafter, alone and beside the target."""
    path = server_args.speculative_draft_model_path
    # The host has read it already, and has its own message for a path that holds no configuration.
    config, _ = PretrainedConfig.get_config_dict(path, revision=server_args.speculative_draft_model_revision)
    problems = [f"drafter {path}: {problem}" for problem in checkpoint_problems(config)]
    if problems:
        return problems
    dflow = DFlowConfig.from_checkpoint(config)
    problems = [
        *_block_size_problems(server_args, dflow),
        *_target_fit_problems(server_args, config),
        *tensor_problems(dflow.tensor_shapes(), _local_relay_shapes(Path(path), dflow)),
    ]
    return [f"drafter {path}: {problem}" for problem in problems]


def _block_size_problems(server_args: Any, dflow: DFlowConfig) -> list[str]:
    return [
        f"block_size is {dflow.block_size}, but --{flag.replace('_', '-')} is {value}. "
        "A block-diffusion drafter serves the block that it was trained for: drop the flag"
        for flag in ("speculative_num_draft_tokens", "speculative_dflash_block_size")
        if (value := getattr(server_args, flag)) is not None and int(value) != dflow.block_size
    ]


def _target_fit_problems(server_args: Any, config: dict[str, Any]) -> list[str]:
    from sglang.srt.utils.hf_transformers_utils import get_config, get_hf_text_config

    target = get_config(
        server_args.model_path,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.revision,
    )
    text = get_hf_text_config(target)
    problems = target_problems(
        config,
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        # Loop models run their layers several times; the host numbers captured layers over all passes.
        num_hidden_layers=int(text.num_hidden_layers) * int(getattr(text, "num_loops", 1)),
    )
    if getattr(target, "model_type", None) == "muse_glimmer":
        problems.append(
            "the target is a muse_glimmer model, whose captured layers the host shifts by one for the names of the "
            "DFlash architectures only. Use --speculative-algorithm DFLASH"
        )
    return problems


def _local_relay_shapes(path: Path, dflow: DFlowConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the relay tensors in a local directory; for a hub id, the expected ones (checked at load)."""
    if not path.is_dir():
        return dflow.tensor_shapes()
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                if name.removeprefix("model.").startswith(RELAY_PREFIXES):
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes
