"""The relay on a GPU: kernels against the formula, inside a CUDA graph, with few launches and no allocation.

Needs a CUDA device; skipped, and said so, without one. Not run yet on any GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from sglang.srt.speculative.dflash_worker_v2 import _DflashDraftSampler

from benchmarks.gpu.parity import CASES, WITHOUT_RELAY, check
from benchmarks.gpu.run_all import Clock, count_launches
from sglang_dflow.relay.alignment import RelayRule, RelaySource
from sglang_dflow.relay.draft_input import TokenTable, relayed_input
from sglang_dflow.relay.modulation import RelayModulation
from sglang_dflow.relay.pool import RelayPool, VerifiedBlock
from sglang_dflow.relay.rescore import RelayRescorer
from sglang_dflow.serving.rescore import HeadRows, RescoringSampler, ServedRescorer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none on this machine"),
]

B, H, W, ROWS, BS = 16, 2560, 640, 9, 4
OURS = ("relay_store", "relay_tokens", "relay_gather", "relay_apply")


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_formula(name: str) -> None:
    """The interpreted cases again, compiled."""
    assert (check(CASES[name], "cuda").relayed == 0) == (name in WITHOUT_RELAY)


class Drafts:
    """Static inputs of one draft, as the host's graph holds them; the last row is padding and stays at slot 0."""

    def __init__(self, *, stale_token: bool, is_table: bool, use_kernels: bool, proposals: bool = False) -> None:
        rule = RelayRule.of(RelaySource.SUFFIX, shift_label=False)
        self.pool = RelayPool(
            num_rows=ROWS, block_size=B, hidden_size=H, rule=rule, dtype=torch.bfloat16, device="cuda",
            stale_token=stale_token, proposals=proposals, use_kernels=use_kernels,
        )  # fmt: skip
        self.relay = RelayModulation(H, W, stale_token=stale_token).to("cuda", torch.bfloat16)
        torch.nn.init.normal_(self.relay.relay_mlp[2].weight, std=0.02)
        table = torch.randn(1000, H, device="cuda", dtype=torch.bfloat16)
        self.embed = TokenTable(table) if is_table else lambda ids: F.embedding(ids, table)
        self.indices = torch.zeros(BS, dtype=torch.int64, device="cuda")
        self.positions = torch.zeros(BS, B, dtype=torch.int64, device="cuda")
        self.masks = torch.randn(BS, B, H, device="cuda", dtype=torch.bfloat16)
        self.blocks = self.masks.clone()

    def draft(self) -> torch.Tensor:
        return relayed_input(self.pool, self.relay, self.embed, self.indices, self.positions, self.blocks)

    def store(self) -> None:
        """A new batch in other slots; what the host writes before its next replay."""
        accept_len = torch.randint(0, B, (BS - 1,), device="cuda")
        block = VerifiedBlock(
            hidden=torch.randn(BS - 1, B, H, device="cuda", dtype=torch.bfloat16),
            prefix_lens=torch.randint(1, 500, (BS - 1,), device="cuda"),
            candidates=torch.randint(0, 1000, (BS - 1, B), device="cuda"),
            accept_len=accept_len,
            bonus=torch.randint(0, 1000, (BS - 1,), device="cuda"),
            stale=torch.randint(0, 1000, (BS - 1, B), device="cuda"),
        )
        slots = torch.randperm(ROWS - 1, device="cuda")[: BS - 1] + 1
        self.pool.store(slots, block)
        self.indices[: BS - 1].copy_(slots)
        starts = block.prefix_lens + accept_len + 1
        self.positions[: BS - 1].copy_(starts.unsqueeze(1) + torch.arange(B, device="cuda"))
        self.blocks.copy_(self.masks)


@pytest.mark.parametrize("use_kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("is_table", [True, False], ids=["table", "looked_up"])
@pytest.mark.parametrize("stale_token", [False, True], ids=["paper", "stale_token"])
@torch.no_grad()
def test_replay_sees_new_pool_contents(stale_token: bool, is_table: bool, use_kernels: bool) -> None:
    """Catches a baked index, a reallocation, a host read (which breaks the capture)."""
    torch.manual_seed(0)
    drafts = Drafts(stale_token=stale_token, is_table=is_table, use_kernels=use_kernels)
    captured: list[torch.Tensor] = []
    replay = Clock("cuda").capture(lambda: captured.append(drafts.draft()))
    out = captured[-1]  # the capture's
    for trial in range(4):
        drafts.store()
        replay()
        replayed = out.clone()
        drafts.blocks.copy_(drafts.masks)
        assert torch.equal(replayed, drafts.draft()), trial
        assert not torch.equal(replayed, drafts.masks), "nothing was relayed: this trial proves nothing"
        assert torch.equal(replayed[-1], drafts.masks[-1])


@pytest.mark.parametrize("use_kernels", [True, False], ids=["kernels", "torch"])
@torch.no_grad()
def test_replay_rescores_from_new_pool_contents(use_kernels: bool) -> None:
    """Head and rescorer folded into the draft's graph: from each round's slots and stale tokens, as eagerly."""
    torch.manual_seed(0)
    drafts = Drafts(stale_token=True, is_table=True, use_kernels=use_kernels, proposals=True)
    head = torch.randn(1000, H, device="cuda", dtype=torch.bfloat16)
    rescorer = RelayRescorer(B, H, 32, device="cuda")
    for parameter in rescorer.parameters():
        torch.nn.init.normal_(parameter)
    sampler = _DflashDraftSampler(weight=head, block_size=B, num_org=1000, org_vocab_start=0, max_bs=BS)
    rows = HeadRows(SimpleNamespace(weight=head), SimpleNamespace(world_size=1))
    embedding = torch.randn(1000, H, device="cuda", dtype=torch.bfloat16)
    rescore = ServedRescorer(rescorer, drafts.pool, rows, TokenTable(embedding, 1.0))
    folded = RescoringSampler(torch.zeros_like(sampler.out), rescore, lambda: drafts.indices)

    def draft() -> None:
        folded(drafts.draft().flatten(0, 1))

    replay = Clock("cuda").capture(draft)
    for trial in range(4):
        drafts.store()
        replay()
        replayed = folded.out.clone()
        drafts.blocks.copy_(drafts.masks)
        draft()
        assert torch.equal(replayed, folded.out), trial
        drafts.blocks.copy_(drafts.masks)
        sampler(drafts.draft().flatten(0, 1))
        assert not torch.equal(replayed, sampler.out), "nothing was rescored: this trial proves nothing"


@pytest.mark.parametrize(("is_table", "launches"), [(True, 3), (False, 4)])
@torch.no_grad()
def test_launches_and_allocations(is_table: bool, launches: int) -> None:
    """Every launch of ours once a round, nothing else beside the host's embedding; no allocation when replayed."""
    torch.manual_seed(0)
    drafts = Drafts(stale_token=True, is_table=is_table, use_kernels=True)
    slots = torch.arange(1, BS, device="cuda")
    ids = torch.zeros(BS - 1, B, dtype=torch.int64, device="cuda")
    states = torch.randn(BS - 1, B, H, device="cuda", dtype=torch.bfloat16)
    block = VerifiedBlock(states, ids[:, 0].clone(), ids, ids[:, 0].clone(), ids[:, 0].clone(), ids)
    replay = Clock("cuda").capture(drafts.draft)

    def one_round() -> None:
        drafts.pool.store(slots, block)
        replay()

    counted = count_launches(one_round)
    ours = {name: count for name, count in counted.items() if name.strip("_").startswith(OURS)}
    assert sum(ours.values()) == launches and set(ours.values()) == {1}, counted
    assert sum(counted.values()) == launches + (0 if is_table else 1), counted  # the stand-in's embedding lookup
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    one_round()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
