"""cpu/graph_capture.py on the relay: a replay sees new contents, and what a CUDA graph would break fails here."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from sglang_dflow.cpu.graph_capture import capture
from sglang_dflow.relay.alignment import RelayRule, RelaySource
from sglang_dflow.relay.draft_input import relayed_input
from sglang_dflow.relay.modulation import RelayModulation
from sglang_dflow.relay.pool import RelayPool, RelayRead, VerifiedBlock
from sglang_dflow.relay.rescore import RelayRescorer

B, H, W, ROWS, BS, VOCAB = 4, 6, 5, 9, 4, 50


class Sampler:
    """The host's sampler for the draft's graph, in short: drafts by a head, left in `out`."""

    def __init__(self, head: torch.Tensor) -> None:
        self.head, self.out = head, torch.zeros(BS * (B - 1), dtype=torch.int64)

    def __call__(self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None) -> None:
        rows = hidden_states.view(BS, B, H)[:, 1:].flatten(0, 1)
        self.out.copy_((rows @ self.head.T).argmax(-1))


class Draft:
    """A relay over static inputs of one bucket of `BS` rows, the last of them padded."""

    def __init__(self, *, stale_token: bool = True) -> None:
        torch.manual_seed(0)
        self.pool = RelayPool(
            num_rows=ROWS,
            block_size=B,
            hidden_size=H,
            rule=RelayRule.of(RelaySource.FIRST_REJECTION, shift_label=False),
            dtype=torch.float32,
            device="cpu",
            stale_token=stale_token,
            proposals=stale_token,
        )
        self.relay = RelayModulation(H, W, stale_token=stale_token)
        torch.nn.init.normal_(self.relay.relay_mlp[2].weight)
        self.table = torch.randn(VOCAB, H)
        self.indices = torch.zeros(BS, dtype=torch.int64)
        self.positions = torch.zeros(BS, B, dtype=torch.int64)
        self.blocks = torch.randn(BS, B, H)

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        embed = lambda ids: F.embedding(ids, self.table)  # noqa: E731
        return relayed_input(self.pool, self.relay, embed, self.indices, self.positions, self.blocks)

    def rescored(self) -> Callable[[], torch.Tensor]:
        """The draft with a head and a rescorer behind it, as they are folded into the draft's CUDA graph."""
        from sglang_dflow.serving.rescore import HeadRows, RescoringSampler, ServedRescorer

        rescorer = RelayRescorer(B, H, W, top_k=3, code_size=2)
        for parameter in rescorer.parameters():
            torch.nn.init.normal_(parameter, std=2.0)
        head = HeadRows(SimpleNamespace(weight=self.table), SimpleNamespace(world_size=1))
        rescore = ServedRescorer(rescorer, self.pool, head, lambda ids: F.embedding(ids, self.table))
        sampler = RescoringSampler(Sampler(self.table).out, rescore, lambda: self.indices)

        def forward() -> torch.Tensor:
            with torch.no_grad():
                sampler(self.forward().flatten(0, 1))
            return sampler.out

        return forward

    def next_round(self) -> None:
        """Verify a block of three requests in other slots, then set the inputs of their next draft, all in place."""
        count = BS - 1
        accept = torch.randint(0, B - 1, (count,))
        prefix = torch.randint(1, 500, (count,))
        slots = torch.randperm(ROWS - 1)[:count] + 1
        block = VerifiedBlock(
            hidden=torch.randn(count, B, H),
            prefix_lens=prefix,
            candidates=torch.randint(0, VOCAB, (count, B)),
            accept_len=accept,
            bonus=torch.randint(0, VOCAB, (count,)),
            stale=torch.randint(0, VOCAB, (count, B)),
        )
        self.pool.store(slots, block)
        self.indices[:count] = slots
        self.positions[:count] = (prefix + accept + 1).unsqueeze(1) + torch.arange(B)
        self.blocks.normal_()


@pytest.mark.parametrize("stale_token", [False, True])
def test_replay_sees_new_pool_contents(stale_token: bool) -> None:
    """Rounds with other slots, positions and states, the switch and a padded row: each replay equals the eager run."""
    draft = Draft(stale_token=stale_token)
    replay = capture(draft.forward)
    for trial in range(6):
        draft.next_round()
        draft.pool.set_enabled(trial != 3)
        replayed, eager = replay(), draft.forward()
        assert torch.equal(replayed, eager), trial
        assert torch.equal(replayed[-1], draft.blocks[-1])
        assert torch.equal(replayed[:-1], draft.blocks[:-1]) == (trial == 3), "rows must have been relayed"


def test_replay_rescores_from_new_pool_contents() -> None:
    """Head and rescorer in the graph: the slots, stale tokens and notes of each round, not those of the capture."""
    draft = Draft()
    forward = draft.rescored()
    replay = capture(forward)
    plain = Sampler(draft.table)
    changed = 0
    for trial in range(24):
        draft.next_round()
        draft.pool.set_enabled(trial != 3)
        replayed = replay().clone()
        assert torch.equal(replayed, forward()), trial
        plain(draft.forward().flatten(0, 1))
        changed += int((replayed != plain.out).sum())
        assert trial != 3 or torch.equal(replayed, plain.out)
        assert torch.equal(replayed[1 - B :], plain.out[1 - B :]), "the padded row has nothing to be rescored with"
    assert changed > 8


def test_replay_writes_what_the_draft_writes() -> None:
    """The per-slot notes of a draft are written inside the graph."""
    draft = Draft()
    replay = capture(draft.forward)
    draft.next_round()
    draft.forward()
    eager = draft.pool.rounds.clone()
    draft.pool.rounds[:, :3].zero_()
    replay()
    assert torch.equal(draft.pool.rounds, eager) and eager.any()


def _read_with(before: Callable[[RelayPool], object]) -> Callable[..., RelayRead]:
    original = RelayPool.read

    def read(self: RelayPool, *args: torch.Tensor) -> RelayRead:
        before(self)
        return original(self, *args)

    return read


@pytest.mark.parametrize(
    "plant",
    [
        lambda pool: None if pool.enabled else pool.clear(),  # a Python branch on a tensor
        lambda pool: pool.next_prefix_len.max().item(),  # a host read
        lambda pool: pool.hidden[pool.next_prefix_len > 0],  # a shape that depends on contents
    ],
    ids=["branch", "item", "mask_index"],
)
def test_a_planted_host_read_fails_the_capture(monkeypatch: pytest.MonkeyPatch, plant: Callable) -> None:
    draft = Draft()
    monkeypatch.setattr(RelayPool, "read", _read_with(plant))
    draft.forward()  # eagerly it works: only the graph can tell
    with pytest.raises(RuntimeError, match="reads a tensor on the host while a graph is captured"):
        capture(draft.forward)


def test_planted_fresh_storage_fails_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that is replaced instead of written: the eager draft follows, the graph keeps reading the old one."""
    draft = Draft()
    original = RelayPool.store

    def store(self: RelayPool, *args: object) -> None:
        self.hidden = self.hidden.clone()
        original(self, *args)  # type: ignore[arg-type]

    replay = capture(draft.forward)
    monkeypatch.setattr(RelayPool, "store", store)
    draft.next_round()
    assert not torch.equal(replay(), draft.forward())


def test_planted_tolist_fails_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tolist` bypasses the dispatcher, so it is baked without an error; a replay then repeats the old value."""
    draft = Draft()

    def stale_position(self: RelayPool, indices: torch.Tensor, positions: torch.Tensor) -> RelayRead:
        return original(self, indices, torch.tensor(positions.tolist()))

    original = RelayPool.read
    monkeypatch.setattr(RelayPool, "read", stale_position)
    replay = capture(draft.forward)
    draft.next_round()
    assert not torch.equal(replay(), draft.forward())
