"""cpu/attention.py against a loop over single queries in fp64, through the host-facing entry points."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dflow.cpu.attention import TorchAttentionBackend, build_plan

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 16
WIDTH, NUM_SLOTS = 96, 512
# fp32 against fp64; bf16 rounds probabilities and outputs to 8 bits.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


class Pool:
    """A KV pool that stores into plain tensors, so that the test does not depend on cpu/kv_pool.py."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (NUM_SLOTS, NUM_KV_HEADS, HEAD_DIM)
        # Every slot holds something: reading a wrong one changes the result.
        self.keys = torch.randn(shape, generator=generator).to(dtype)
        self.values = torch.randn(shape, generator=generator).to(dtype)

    def set_kv_buffer(self, layer: Any, loc: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        for row, slot in enumerate(loc.loc.tolist()):
            self.keys[slot], self.values[slot] = k[row], v[row]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values


@dataclass
class Case:
    """One forward: per request the tokens already cached and the tokens computed now."""

    mode: ForwardMode
    prefix: list[int]
    new: list[int]
    attn_type: AttentionType = AttentionType.DECODER
    window: int = -1
    dtype: torch.dtype = torch.float32
    page_size: int = 1
    extras: dict[str, Any] = field(default_factory=dict)


def req_to_token(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Scatter every request's tokens over the slots, page by page; unused columns point at other slots."""
    generator = torch.Generator().manual_seed(1)
    page = case.page_size
    pages = torch.randperm(NUM_SLOTS // page - 1, generator=generator) + 1
    per_row = WIDTH // page
    rows = [pages[i * per_row : (i + 1) * per_row] for i in range(len(case.prefix))]
    slots = torch.stack([(row.unsqueeze(1) * page + torch.arange(page)).reshape(-1) for row in rows])
    table = torch.zeros(len(rows) + 2, slots.shape[1], dtype=torch.int32)
    pool_rows = torch.arange(len(rows)).flip(0) + 1  # not the identity
    table[pool_rows] = slots.to(torch.int32)
    return table, pool_rows


def run(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the backend's output and the reference's, `[N, Hq * D]`."""
    pool = Pool(case.dtype)
    table, pool_rows = req_to_token(case)
    lengths = [before + now for before, now in zip(case.prefix, case.new, strict=True)]
    total = sum(case.new)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(total, NUM_HEADS * HEAD_DIM, generator=generator).to(case.dtype)
    k = torch.randn(total, NUM_KV_HEADS, HEAD_DIM, generator=generator).to(case.dtype)
    v = torch.randn(total, NUM_KV_HEADS, HEAD_DIM, generator=generator).to(case.dtype)
    locs = [
        table[row, before:length] for row, before, length in zip(pool_rows.tolist(), case.prefix, lengths, strict=True)
    ]
    is_verify = case.mode.is_target_verify()
    batch = SimpleNamespace(
        forward_mode=case.mode,
        batch_size=len(lengths),
        req_pool_indices=pool_rows,
        # A verify's lengths exclude its block, every other mode's include the new tokens.
        seq_lens=torch.tensor(case.prefix if is_verify else lengths),
        extend_seq_lens=torch.tensor(case.new),
        spec_info=SimpleNamespace(draft_token_num=case.new[0]) if is_verify else None,
        out_cache_loc=torch.cat(locs).to(torch.int64),
        out_cache_loc_is_physical=True,
    )
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=NUM_HEADS,
        qk_head_dim=HEAD_DIM,
        scaling=HEAD_DIM**-0.5,
        attn_type=case.attn_type,
        sliding_window_size=case.window,
        is_cross_attention=False,
        logit_cap=0.0,
    )
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=pool, is_hybrid_swa=False
    )
    backend = TorchAttentionBackend(runner)  # type: ignore[arg-type]
    backend.init_forward_metadata(batch)  # type: ignore[arg-type]
    found = backend.forward(q, k, v, layer, batch, **case.extras)
    return found, reference(case, pool, table, pool_rows, q, lengths)


def reference(
    case: Case,
    pool: Pool,
    table: torch.Tensor,
    pool_rows: torch.Tensor,
    q: torch.Tensor,
    lengths: list[int],
) -> torch.Tensor:
    """One query and one head at a time, in fp64; the pool already holds the new tokens."""
    queries = q.double().view(-1, NUM_HEADS, HEAD_DIM)
    out = torch.empty_like(queries)
    row = 0
    for request, (before, length) in enumerate(zip(case.prefix, lengths, strict=True)):
        slots = table[int(pool_rows[request]), :length].long()
        keys, values = pool.keys[slots].double(), pool.values[slots].double()
        for position in range(before, length):
            first = 0 if case.window < 0 else max(0, position - case.window)
            last = position + 1 if case.attn_type == AttentionType.DECODER else length
            for head in range(NUM_HEADS):
                kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
                scores = keys[first:last, kv_head] @ queries[row, head] / math.sqrt(HEAD_DIM)
                out[row, head] = torch.softmax(scores, 0) @ values[first:last, kv_head]
            row += 1
    return out.flatten(1)


CASES = {
    "decode": Case(ForwardMode.DECODE, [0, 7, 40], [1, 1, 1]),
    "decode of one request": Case(ForwardMode.DECODE, [33], [1]),
    "decode, window": Case(ForwardMode.DECODE, [3, 40], [1, 1], window=8),
    "decode, one long request among short ones": Case(ForwardMode.DECODE, [80] + [1] * 3, [1] * 4),
    "prefill": Case(ForwardMode.EXTEND, [0, 0], [5, 12]),
    "prefill of one token": Case(ForwardMode.EXTEND, [0], [1]),
    "extend over a cached prefix": Case(ForwardMode.EXTEND, [10, 0, 31], [5, 9, 1]),
    "last chunk of a long prompt": Case(ForwardMode.EXTEND, [40], [45]),
    "extend with equal lengths": Case(ForwardMode.EXTEND, [4, 9], [6, 6]),
    "extend, window": Case(ForwardMode.EXTEND, [20, 2], [12, 40], window=5),
    "mixed chunk and decode": Case(ForwardMode.MIXED, [16, 25, 3], [40, 1, 1]),
    "verify": Case(ForwardMode.TARGET_VERIFY, [1, 30, 55], [8, 8, 8]),
    "verify of one request": Case(ForwardMode.TARGET_VERIFY, [30], [8]),
    "verify, window": Case(ForwardMode.TARGET_VERIFY, [1, 30], [8, 8], window=4),
    "draft block": Case(ForwardMode.TARGET_VERIFY, [1, 30], [8, 8], attn_type=AttentionType.ENCODER_ONLY),
    "draft block of equal prefixes": Case(
        ForwardMode.TARGET_VERIFY, [30, 30], [8, 8], attn_type=AttentionType.ENCODER_ONLY
    ),
    "draft block, window": Case(
        ForwardMode.TARGET_VERIFY, [1, 30], [8, 8], attn_type=AttentionType.ENCODER_ONLY, window=6
    ),
    "bidirectional extend": Case(ForwardMode.EXTEND, [0, 4], [7, 3], attn_type=AttentionType.ENCODER_ONLY),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str, page_size: int, dtype: torch.dtype) -> None:
    """Catches wrong slots, wrong masks, wrong grouping of heads and rows of one request in another's output."""
    case = CASES[name]
    found, expected = run(
        Case(case.mode, case.prefix, case.new, case.attn_type, case.window, dtype=dtype, page_size=page_size)
    )
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=0)


def test_both_layouts_occur() -> None:
    """The cases above mean little if all of them took one path."""
    table = torch.zeros(4, WIDTH, dtype=torch.int32)
    rows = torch.arange(3)
    assert build_plan(table, rows, [8, 8, 8], [9, 38, 63]).padded
    assert not build_plan(table, rows, [40, 1, 1], [56, 26, 4]).padded
    assert not build_plan(table, rows, [40, 40, 40], [56, 56, 56]).padded


def test_padding_is_dropped_when_one_request_would_dominate() -> None:
    """A batch of many short requests is not padded to one very long one."""
    table = torch.zeros(64, 8192, dtype=torch.int32)
    assert not build_plan(table, torch.arange(64), [1] * 64, [8000] + [10] * 63).padded
    assert build_plan(table, torch.arange(64), [1] * 64, [8000] * 64).padded


def test_stale_columns_are_not_read() -> None:
    """Padding reads slot 0, never the slots that an earlier request left in its row."""
    table = torch.full((2, WIDTH), 77, dtype=torch.int32)
    plan = build_plan(table, torch.tensor([0, 1]), [1, 1], [3, 5])
    assert plan.kv_slots.view(2, 5).tolist() == [[77, 77, 77, 0, 0], [77] * 5]


def test_idle_batch_needs_no_plan() -> None:
    """A data-parallel rank without requests runs the model on no rows."""
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(1, 1)),
        token_to_kv_pool=None,
        is_hybrid_swa=False,
    )
    backend = TorchAttentionBackend(runner)  # type: ignore[arg-type]
    batch = SimpleNamespace(forward_mode=ForwardMode.IDLE, batch_size=0)
    backend.init_forward_metadata(batch)  # type: ignore[arg-type]
    layer = SimpleNamespace(tp_q_head_num=NUM_HEADS, v_head_dim=HEAD_DIM)
    out = backend.forward(torch.empty(0, NUM_HEADS * HEAD_DIM), None, None, layer, batch)
    assert out.shape == (0, NUM_HEADS * HEAD_DIM)


def test_what_would_change_the_output_is_refused() -> None:
    """Sinks given by the model must not be dropped silently."""
    with pytest.raises(NotImplementedError, match=r"'sinks'.*layer 0"):
        run(Case(ForwardMode.DECODE, [4], [1], extras={"sinks": torch.zeros(NUM_HEADS)}))


def test_masks_are_built_once_per_forward() -> None:
    """All layers of one forward share the plan's mask object."""
    from sglang_dflow.cpu.attention import _folded_mask

    plan = build_plan(torch.zeros(2, WIDTH, dtype=torch.int32), torch.arange(2), [8, 8], [9, 30])
    first = _folded_mask(plan, True, -1, 3, torch.float32)
    assert first is not None and first is _folded_mask(plan, True, -1, 3, torch.float32)
