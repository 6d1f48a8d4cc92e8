"""Tensor parallel 2 on the real server: two processes, gloo, a vocabulary-parallel embedding under the relay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_dflow.server import relay_state
from tests.support.arms import Arm, ArmResult
from tests.support.tiny_pair import VOCAB_SIZE, TinyPair, make_tiny_pair

CORES = {1: "all", 2: "0|1"}
"""Cores of each rank: the host gives a rank a whole NUMA node by default, and refuses more ranks than nodes."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return make_tiny_pair(tmp_path_factory.mktemp("tiny_pair"))


def _serve(pair: TinyPair, tp_size: int, folder: Path) -> ArmResult:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, VOCAB_SIZE - 1, (5 + i,), generator=generator).tolist() for i in range(4)]
    arm = Arm(
        drafter=pair.drafter,
        concurrency={1: len(prompts)},
        extra_args=("--skip-tokenizer-init", "--max-running-requests", "4", "--tp-size", str(tp_size)),
        env={"SGLANG_CPU_OMP_THREADS_BIND": CORES[tp_size]},
        probe={"trace": str(folder / "trace")},
        ask=lambda server: relay_state(server.url),
    )
    return arm.run(pair.target, prompts, folder)


def test_two_ranks_draft_and_commit_what_one_does(pair: TinyPair, tmp_path: Path) -> None:
    """Catches boundary or stale embeddings of one rank's vocabulary only, and states that differ between the ranks.

    Both ranks write the trace of the second server, so rounds are compared as sets.
    """
    one, two = (_serve(pair, tp_size, tmp_path / str(tp_size)) for tp_size in (1, 2))
    assert [a.output_ids for a in one.outputs[1]] == [b.output_ids for b in two.outputs[1]]
    assert len(set(one.rounds)) > 50
    assert set(one.rounds) == set(two.rounds)
    assert one.extra["relayed_rows"] == two.extra["relayed_rows"] > 100
