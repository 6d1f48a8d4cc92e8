"""Kernels against the formula, one batch at a time: the same checks interpreted, on a device, and in the device script.

    python -m benchmarks.gpu.interpreted benchmarks.gpu.parity      # all cases on the CPU

The expected values come from the raw inputs in float64, row by row; neither the pool nor `relay/alignment.py` nor
`RelayModulation.forward` takes part. The torch path runs beside the kernels, to show what its rounding costs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from sglang_dflow.relay.alignment import RelayRule, RelaySource
from sglang_dflow.relay.draft_input import EmbedTokens, TokenTable, relayed_input
from sglang_dflow.relay.modulation import RelayModulation
from sglang_dflow.relay.pool import RelayPool, VerifiedBlock

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error over the largest expected value. 16 bits round hidden layer and sum once each, by 2^-11 or 2^-8."""

VOCABULARY = 53
_ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


@dataclass(frozen=True)
class Case:
    """One batch. Its last rows are padding; request 1 drafts two positions further on, request 2 one too early.

    Attributes:
        embedding: "table", "scaled" (a table times 1.7), "wide" (a float32 table) or "function" (looked up outside).
        accept: "mixed", "all" (everything accepted), "none".
        switched_off: the run-time switch is off.
        bad_state: one NaN, in the last feature of the first relayed state. Rows that nobody reads are NaN in any case.
    """

    dtype: torch.dtype = torch.float32
    block_size: int = 8
    hidden_size: int = 72
    width: int = 40
    relay_source: RelaySource = RelaySource.SUFFIX
    shift_label: bool = False
    stale_token: bool = False
    activation: str = "silu"
    embedding: str = "table"
    accept: str = "mixed"
    requests: int = 3
    padding: int = 1
    switched_off: bool = False
    bad_state: bool = False


class Outcome(NamedTuple):
    """Largest error over the largest expected value, of the kernels and of the torch path; and the rows relayed."""

    kernels: float
    torch_path: float
    relayed: int


class _Batch(NamedTuple):
    block: VerifiedBlock
    slots: torch.Tensor  # [requests]
    starts: torch.Tensor  # [requests], first position of each draft
    blocks: torch.Tensor  # [bs, B, H]
    table: torch.Tensor  # [V, H]
    relay: RelayModulation


def _batch(case: Case, device: str, seed: int) -> _Batch:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(device)

    n, size = case.requests, case.block_size
    accept = {"all": (size - 1, size), "none": (0, 1), "mixed": (0, size)}[case.accept]
    accept_len = integers(*accept, n).to(torch.int32)
    prefix_lens = integers(1, 500, n)
    jumps = torch.zeros(n, dtype=torch.int64, device=device)
    jumps[1:3] = torch.tensor([2, -1], device=device)[: max(0, n - 1)]
    relay = RelayModulation(case.hidden_size, case.width, activation=case.activation, stale_token=case.stale_token)
    for parameter in relay.parameters():
        scale = parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 0.5
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    return _Batch(
        block=VerifiedBlock(
            hidden=normal(n, size, case.hidden_size),
            prefix_lens=prefix_lens,
            candidates=integers(0, VOCABULARY, n, size),
            accept_len=accept_len,
            bonus=integers(0, VOCABULARY, n),
            stale=integers(0, VOCABULARY, n, size),
        ),
        slots=(torch.randperm(n + 2, generator=generator)[:n] + 1).to(device),
        starts=prefix_lens + accept_len + 1 + jumps,
        blocks=normal(n + case.padding, size, case.hidden_size),
        table=normal(VOCABULARY, case.hidden_size, dtype=torch.float32 if case.embedding == "wide" else case.dtype),
        relay=relay.to(device, case.dtype),
    )


def _embedding(case: Case, table: torch.Tensor) -> EmbedTokens:
    if case.embedding == "function":
        return lambda ids: F.embedding(ids, table)
    return TokenTable(table, scale=1.7 if case.embedding == "scaled" else 1.0)


def _sources(case: Case, batch: _Batch) -> dict[tuple[int, int], int]:
    """Relayed (request, row) -> source row, by the method's two rules."""
    first = 2 if case.relay_source is RelaySource.SUFFIX else 1
    shift = int(case.shift_label)
    found = {}
    for request, accept_len in enumerate(batch.block.accept_len.tolist()):
        behind = int(batch.starts[request]) - (int(batch.block.prefix_lens[request]) + accept_len + 1)
        for row in range(max(1, first - shift), case.block_size):
            source = row + behind + accept_len + shift
            in_block = row + behind >= 1 and accept_len + first <= source < case.block_size
            if in_block and not case.switched_off:
                found[request, row] = source
    return found


def _expected(case: Case, batch: _Batch, sources: dict[tuple[int, int], int]) -> torch.Tensor:
    """[bs, B, H] float64."""
    weights = {name: tensor.double() for name, tensor in batch.relay.state_dict().items()}
    table = batch.table
    if case.embedding == "scaled":
        table = table * 1.7
    table = table.to(case.dtype).double()
    out = batch.blocks.double()
    for (request, row), source in sources.items():
        block = batch.block
        state = block.hidden[request, source].double()
        rejected = block.candidates[request, min(int(block.accept_len[request]) + 1, case.block_size - 1)]
        parts = [table[block.bonus[request]], table[rejected], state]
        if case.stale_token:
            assert block.stale is not None
            parts.append(table[block.stale[request, source]])
        hidden = weights["relay_mlp.0.weight"] @ torch.cat(parts) + weights["relay_mlp.0.bias"]
        both = weights["relay_mlp.2.weight"] @ _ACTIVATIONS[case.activation](hidden) + weights["relay_mlp.2.bias"]
        beta, gamma = both.chunk(2)
        norm = (state - state.mean()) / torch.sqrt(state.var(unbiased=False) + 1e-6)
        norm = norm * weights["relay_norm.weight"] + weights["relay_norm.bias"]
        out[request, row] += beta * norm + gamma
    return out


def _pool(case: Case, device: str, *, use_kernels: bool) -> RelayPool:
    rule = RelayRule.of(case.relay_source, shift_label=case.shift_label)
    pool = RelayPool(
        num_rows=case.requests + 3, block_size=case.block_size, hidden_size=case.hidden_size, rule=rule,
        dtype=case.dtype, device=device, stale_token=case.stale_token, use_kernels=use_kernels,
    )  # fmt: skip
    pool.set_enabled(not case.switched_off)
    return pool


def _check_stored(pool: RelayPool, batch: _Batch) -> None:
    """Every tensor of the pool against the block, exactly; statistics within float32 rounding."""
    block, slots = batch.block, batch.slots
    accepted = block.accept_len.to(torch.int64)
    boundary = (accepted + 1).clamp_max(pool.block_size - 1)
    rejected = torch.stack([block.candidates[r, j] for r, j in enumerate(boundary.tolist())])
    expected = {
        "hidden": (pool.hidden, block.hidden),
        "next_prefix_len": (pool.next_prefix_len, block.prefix_lens + accepted + 1),
        "accept_len": (pool.accept_len, accepted),
        "bonus": (pool.bonus, block.bonus),
        "rejected": (pool.rejected, rejected),
    }
    if pool.stale is not None:
        assert block.stale is not None
        expected["stale"] = (pool.stale, block.stale)
    for name, (found, wanted) in expected.items():
        assert torch.equal(found[slots], wanted), f"relay_store wrote another {name}"
    untouched = torch.ones(len(pool.hidden), dtype=torch.bool, device=slots.device)
    untouched[slots] = False
    assert (pool.next_prefix_len[untouched] == -1).all(), "relay_store wrote into a foreign row"
    assert (pool.hidden[untouched] == 0).all(), "relay_store wrote into a foreign row"
    assert pool.row_stats is not None
    states = block.hidden.double()
    stats = torch.stack((states.mean(-1), states.var(-1, unbiased=False)), dim=-1)
    torch.testing.assert_close(pool.row_stats[slots].double(), stats, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def check(case: Case, device: str, *, seed: int = 0) -> Outcome:
    """Store a batch, draft from it, compare everything.

    Raises:
        AssertionError: a row without relay changed, a count differs, the pool holds something else, or an error is
            above the tolerance.
    """
    batch = _batch(case, device, seed)
    size = case.block_size
    sources = _sources(case, batch)
    indices = F.pad(batch.slots, (0, case.padding))  # [bs]
    starts = F.pad(batch.starts, (0, case.padding))
    positions = starts[:, None] + torch.arange(size, device=device)  # [bs, B]
    embedding = _embedding(case, batch.table)

    pool, reference = _pool(case, device, use_kernels=True), _pool(case, device, use_kernels=False)
    for each in (pool, reference):
        each.store(batch.slots, batch.block)
    _check_stored(pool, batch)
    expected = _expected(case, batch, sources)
    refused = min(sources) if case.bad_state else None
    used = {(request, source) for (request, _), source in sources.items()}
    for each in (pool, reference):
        for request, slot in enumerate(batch.slots.tolist()):
            unread = [j for j in range(size) if (request, j) not in used]
            each.hidden[slot, unread] = float("nan")
        each.hidden[0] = float("nan")
        if refused is not None:
            each.hidden[batch.slots[refused[0]], sources[refused], -1] = float("nan")
    rounds = torch.tensor([[0, 0, -1, 0]] * len(indices))
    for request, row in sources:
        rounds[request, 1 if (request, row) == refused else 0] += 1
    for request, accept_len in enumerate(batch.block.accept_len.tolist()):
        rounds[request, 3] = accept_len
        if int(batch.starts[request]) == int(pool.next_prefix_len[batch.slots[request]]):
            rounds[request, 2] = accept_len

    outputs = []
    for each in (pool, reference):
        out = relayed_input(each, batch.relay, embedding, indices, positions, batch.blocks.clone())
        assert torch.equal(each.last_rounds(indices).cpu(), rounds), "rows taken, refused, or the accept length"
        changed = torch.zeros(out.shape[:2], dtype=torch.bool, device=device)
        for request, row in sources:
            changed[request, row] = (request, row) != refused
        assert torch.equal(out[~changed], batch.blocks[~changed]), "a row without relay lost its bits"
        outputs.append((out.double() - expected)[changed])
    scale = expected.abs().max()
    errors = [float(error.abs().max() / scale) if error.numel() else 0.0 for error in outputs]
    assert errors[0] <= TOLERANCE[case.dtype], f"error {errors[0]:.2e} in {case}"
    return Outcome(*errors, relayed=int(changed.sum()))


_FIRST = RelaySource.FIRST_REJECTION
CASES: dict[str, Case] = {
    "suffix": Case(),
    "first_rejection": Case(relay_source=_FIRST, accept="none"),
    "suffix_shift_label": Case(shift_label=True, accept="none"),
    "first_rejection_shift_label": Case(relay_source=_FIRST, shift_label=True, dtype=torch.float16),
    "block_5": Case(block_size=5, accept="none", dtype=torch.bfloat16),
    "block_16": Case(block_size=16, requests=2, padding=2),
    "all_accepted": Case(accept="all", dtype=torch.float16),
    "all_rejected": Case(accept="none", dtype=torch.bfloat16),
    "one_request": Case(requests=1, padding=0, accept="none"),
    "more_than_a_tile": Case(requests=9, padding=2, relay_source=_FIRST, dtype=torch.bfloat16),
    "all_padding_but_one": Case(requests=1, padding=10, accept="none"),
    "gelu": Case(activation="gelu", accept="none"),
    "relu": Case(activation="relu", accept="none", dtype=torch.float16),
    "stale": Case(stale_token=True, accept="none", dtype=torch.bfloat16),
    "stale_shift_label": Case(stale_token=True, shift_label=True, relay_source=_FIRST),
    "stale_looked_up": Case(stale_token=True, embedding="function", accept="none"),
    "looked_up": Case(embedding="function", dtype=torch.float16, requests=5),
    "scaled_table": Case(embedding="scaled", accept="none", dtype=torch.bfloat16),
    "wide_table": Case(embedding="wide", accept="none", dtype=torch.bfloat16),
    "switched_off": Case(switched_off=True, accept="none"),
    "bad_state": Case(bad_state=True, accept="none", dtype=torch.bfloat16),
    "bad_state_relu_stale": Case(bad_state=True, accept="none", activation="relu", stale_token=True),
    "smollm2_bfloat16": Case(hidden_size=576, width=384, stale_token=True, relay_source=_FIRST, dtype=torch.bfloat16),
    "smollm2_float16": Case(hidden_size=576, width=40, block_size=16, requests=2, dtype=torch.float16),
}
"""Odd sizes on purpose: 72 features and a width of 40 fill no tile, 5 rows no power of two."""

WITHOUT_RELAY = {"all_accepted", "switched_off"}


def main() -> None:
    """Print one JSON line per case: its outcome, or what it complains about."""
    for name, case in CASES.items():
        try:
            print(json.dumps({"case": name} | check(case, "cpu")._asdict()), flush=True)
        except AssertionError as error:
            print(json.dumps({"case": name, "problem": str(error)}), flush=True)


if __name__ == "__main__":
    main()
