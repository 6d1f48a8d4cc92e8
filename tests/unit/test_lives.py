"""tests/support: the model of a request's life catches what it is there for; so does the guard against host reads."""

from __future__ import annotations

import json
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from tests.support.lives import Life, read_lives
from tests.support.probe.dflow_probe_lives import forbid_host_reads


def _round(rid: str, slot: int, prefix_len: int, accept_len: int, relayed: int) -> dict[str, Any]:
    return {"kind": "round", "rids": [rid], "slots": [slot], "prefix_lens": [prefix_len], "accept_lens": [accept_len],
            "relayed": [relayed], "enabled": True}  # fmt: skip


def _extend(rid: str, slot: int, *, length: int = 5) -> dict[str, Any]:
    return {"kind": "extend", "rids": [rid], "slots": [slot], "extend_lens": [length]}


@pytest.mark.parametrize(
    ("trace", "wrong"),
    [
        ([_extend("a", 1), _round("a", 1, 5, 2, 0), _round("a", 1, 8, 7, 5), _round("a", 1, 16, 0, 0)], 0),
        ([_extend("a", 1), _round("a", 1, 5, 2, 1)], 1),  # something was relayed into a first round
        ([_extend("a", 1), _round("a", 1, 5, 2, 0), _round("a", 1, 8, 7, 4)], 1),  # a row was lost
        ([_extend("a", 1), _round("a", 1, 5, 2, 0), _round("a", 1, 9, 0, 0)], 1),  # a position was skipped
        ([_extend("a", 1), _round("a", 1, 5, 2, 0), _extend("b", 1), _round("b", 1, 8, 0, 5)], 1),  # b read a's rows
        ([_extend("a", 1), _round("a", 1, 5, 2, 0), _extend("a", 2), _round("a", 2, 9, 0, 0)], 0),
        ([_extend("a", 1), _round("a", 1, 5, 2, 0), {"kind": "forget"}, _round("a", 1, 8, 0, 5)], 1),
    ],
)
def test_wrong_drafts_are_found(tmp_path: Path, trace: list[dict[str, Any]], wrong: int) -> None:
    path = tmp_path / "lives"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in trace))
    lives = read_lives(path, block_size=8)
    assert len(lives.wrong) == wrong, lives.wrong
    assert lives.seen[Life.FIRST_ROUND] > 0


@pytest.mark.parametrize(("length", "life"), [(1, Life.MIXED_CHUNK), (9, Life.RESUMED)])
def test_a_second_prefill_is_a_mixed_chunk_or_a_retraction(tmp_path: Path, length: int, life: Life) -> None:
    """Told apart by what is prefilled: a resumed request may be in a mixed chunk, too."""
    path = tmp_path / "lives"
    trace = [_extend("a", 1), _round("a", 1, 5, 2, 0), _extend("a", 1, length=length), _round("a", 1, 9, 0, 0)]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in trace))
    lives = read_lives(path, block_size=8)
    assert lives.seen[life] == 1 and lives.wrong == []
    assert lives.seen[Life.MIXED_CHUNK] + lives.seen[Life.RESUMED] == 1


def test_host_reads_are_forbidden_in_the_decode_path_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end-to-end tests run under this guard: if it let a read pass, they would prove nothing."""

    def reads(tensor: torch.Tensor) -> bool:
        return bool(tensor.item()) and bool(tensor)

    ours = FunctionType(reads.__code__, {"__name__": "sglang_dflow.relay.pool", "bool": bool})
    forbid_host_reads(lambda name, method: monkeypatch.setattr(torch.Tensor, name, method))
    assert reads(torch.tensor(1))
    with pytest.raises(AssertionError, match="Tensor.item in sglang_dflow.relay.pool.reads"):
        ours(torch.tensor(1))
