"""The relay inside a CUDA graph: replay with new pool contents equals the eager computation.

Needs a CUDA device; skipped, and said so, without one. Not run yet on any GPU.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sglang_dflow.relay.alignment import RelayRule, RelaySource
from sglang_dflow.relay.draft_input import relayed_input
from sglang_dflow.relay.modulation import RelayModulation
from sglang_dflow.relay.pool import RelayPool, VerifiedBlock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none on this machine"),
]

B, H, W, ROWS, BS = 16, 2560, 640, 9, 4


@pytest.mark.parametrize("stale_token", [False, True])
@torch.no_grad()
def test_replay_sees_new_pool_contents(stale_token: bool) -> None:
    """Catches a baked index, a reallocation, a host read (which breaks the capture)."""
    torch.manual_seed(0)
    rule = RelayRule.of(RelaySource.SUFFIX, shift_label=False)
    dtype = torch.bfloat16
    pool = RelayPool(
        num_rows=ROWS, block_size=B, hidden_size=H, rule=rule, dtype=dtype, device="cuda", stale_token=stale_token
    )
    relay = RelayModulation(H, W, stale_token=stale_token).to("cuda", torch.bfloat16)
    torch.nn.init.normal_(relay.relay_mlp[2].weight, std=0.02)
    table = torch.randn(1000, H, device="cuda", dtype=torch.bfloat16)
    indices = torch.zeros(BS, dtype=torch.int64, device="cuda")
    positions = torch.zeros(BS, B, dtype=torch.int64, device="cuda")
    masks = torch.randn(BS, B, H, device="cuda", dtype=torch.bfloat16)

    def relayed() -> torch.Tensor:
        return relayed_input(pool, relay, lambda ids: F.embedding(ids, table), indices, positions, masks)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        relayed()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = relayed()

    for trial in range(4):
        accept = torch.randint(0, B, (BS - 1,), device="cuda")
        prefix = torch.randint(1, 500, (BS - 1,), device="cuda")
        slots = torch.randperm(ROWS - 1, device="cuda")[: BS - 1] + 1
        block = VerifiedBlock(
            hidden=torch.randn(BS - 1, B, H, device="cuda", dtype=torch.bfloat16),
            accept_len=accept,
            next_prefix_len=prefix + accept + 1,
            bonus=torch.randint(0, 1000, (BS - 1,), device="cuda"),
            rejected=torch.randint(0, 1000, (BS - 1,), device="cuda"),
            stale=torch.randint(0, 1000, (BS - 1, B), device="cuda"),
        )
        pool.store(slots, block)
        indices[: BS - 1].copy_(slots)  # the last row is padding and stays 0
        positions[: BS - 1].copy_(block.next_prefix_len.unsqueeze(1) + torch.arange(B, device="cuda"))
        graph.replay()
        expected = relayed()
        assert torch.equal(out, expected), trial
        assert torch.equal(out[-1], masks[-1])
