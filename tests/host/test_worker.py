"""serving/worker.py over the host's base class, whose own work is replaced: what our overrides add, and when.

The real scheduler and worker run in tests/e2e; here single steps are driven by hand, because a step that leaks one
request's states into another's draft would only lower acceptance there.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

from sglang_dflow.algorithm import NAME, DFlowAlgorithm
from sglang_dflow.relay.alignment import RelayRule, RelaySource
from sglang_dflow.relay.pool import DraftRows, RelayPool
from sglang_dflow.serving.metrics import RELAYED_KEY, DropReason, RelayMetrics
from sglang_dflow.serving.worker import DFlowWorker

B, H, ROWS = 4, 3, 6


class Steps:
    """A worker without a model: `prefill` and `verify` are the host's two kinds of iteration."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, stale_token: bool = False) -> None:
        self.pool = RelayPool(
            num_rows=ROWS,
            block_size=B,
            hidden_size=H,
            rule=RelayRule.of(RelaySource.FIRST_REJECTION, shift_label=False),
            dtype=torch.float32,
            device="cpu",
            stale_token=stale_token,
        )
        self.worker: Any = DFlowWorker.__new__(DFlowWorker)
        self.worker._pool, self.worker.block_size = self.pool, B
        self.worker._metrics = self.metrics = RelayMetrics(B, self.pool.rule)
        self.worker._req_pool_indices = self.worker._accepted = None
        self.worker._forget_relayed = False
        self.refreshed: list[bool] = []
        self.worker._rescore = SimpleNamespace(refresh=lambda: self.refreshed.append(True))
        self.projected = torch.empty(0)
        self.worker.draft_model = SimpleNamespace(take_projected=lambda: self.projected)
        self.drafted_from: list[torch.Tensor] = []
        monkeypatch.setattr(DFlashWorkerV2, "_append_target_hidden_to_draft_kv_by_loc", lambda *a, **k: None)
        self.host_accepts_with: dict[str, Any] = {}

        def accept(_worker: Any, **arguments: Any) -> Any:
            self.host_accepts_with = arguments
            return self._accepted

        monkeypatch.setattr(DFlashWorkerV2, "_accept_block", accept)
        monkeypatch.setattr(DFlashWorkerV2, "forward_batch_generation", lambda worker, batch: batch.step())

    def _batch(self, slots: list[int], *, extend: bool, step: Any, mixed: bool = False, idle: bool = False) -> Any:
        mode = SimpleNamespace(is_extend=lambda: extend, is_idle=lambda: idle)
        return SimpleNamespace(
            req_pool_indices=torch.tensor(slots), forward_mode=mode, is_extend_in_batch=mixed, step=step
        )

    def prefill(self, slots: list[int], *, mixed: bool = False) -> None:
        """One extend iteration over these slots."""

        def step() -> None:
            self.projected = torch.zeros((5, H))
            self.worker._append_target_hidden_to_draft_kv_by_loc(commit_lens=None)

        self.worker.forward_batch_generation(self._batch(slots, extend=not mixed, mixed=mixed, step=step))

    def verify(
        self, slots: list[int], prefix_lens: list[int], accept_lens: list[int], fill: float = 1.0, **logits: Any
    ) -> Any:
        """One draft-verify iteration: remembers what the drafts read, then commits. Returns the worker's result."""
        prefix = torch.tensor(prefix_lens)
        candidates = torch.arange(len(slots) * B).view(-1, B) + 1000  # [bs, B]
        accept = torch.tensor(accept_lens, dtype=torch.int32)

        def step() -> Any:
            indices = torch.tensor(slots)
            read = self.pool.read(indices, prefix.unsqueeze(1) + torch.arange(B))
            self.drafted_from.append(read.mask.sum(dim=1))
            self.pool.note_draft(indices, DraftRows(self.drafted_from[-1], torch.zeros_like(indices), read.accept_len))
            self._accepted = (accept, accept + 1, torch.arange(len(slots)) + 7, None, None)
            self.worker._accept_block(candidates=candidates, prefix_lens=prefix, **logits)
            self.projected = torch.full((len(slots) * B, H), fill)
            self.worker._append_target_hidden_to_draft_kv_by_loc(commit_lens=accept + 1)
            logits_output = SimpleNamespace(auxiliary_device_output=None)
            return SimpleNamespace(accept_lens=accept + 1, logits_output=logits_output)

        return self.worker.forward_batch_generation(self._batch(slots, extend=False, step=step))

    @property
    def relayed(self) -> list[int]:
        """Relayed rows of each request in the last draft."""
        return self.drafted_from[-1].tolist()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def test_step_table(steps: Steps) -> None:
    """Join, advance with different accept lengths, full accept, join while decoding, finish, reuse, mixed chunk."""
    table = [
        # kind, slots, prefix lengths, accept lengths, relayed rows that this draft must have found, reason
        ("prefill", [1, 2], None, None, None),
        ("verify", [1, 2], [10, 20], [0, 2], [0, 0]),  # first round after prefill: plain masks
        ("verify", [1, 2], [11, 23], [3, 1], [3, 1]),  # a=0 relays 3 rows, a=2 relays 1
        ("verify", [1, 2], [15, 25], [0, 0], [0, 2]),  # full acceptance leaves nothing
        ("prefill", [3], None, None, None),  # joins while the others decode
        ("verify", [2, 3, 1], [26, 5, 16], [1, 1, 0], [3, 0, 3]),  # order of the batch does not matter
        ("prefill", [1], None, None, None),  # request 1 finished; a new one takes its slot
        ("verify", [1, 2, 3], [17, 28, 7], [0, 0, 0], [0, 2, 2]),  # at the very position of the old one: nothing
        ("mixed", [2, 3], None, None, None),  # both advance inside a mixed chunk
        ("verify", [2, 3], [29, 8], [0, 0], [0, 0]),
    ]
    for kind, slots, prefix_lens, accept_lens, expected in table:
        if kind == "verify":
            steps.verify(slots, prefix_lens, accept_lens)
            assert steps.relayed == expected, (slots, prefix_lens)
        else:
            steps.prefill(slots, mixed=kind == "mixed")


def test_boundary_of_a_round(steps: Steps) -> None:
    """Bonus, rejected token and next prefix length of three accept lengths; the rejected one is row a+1."""
    steps.verify([1, 2, 3], [10, 20, 30], [0, 2, 3])
    assert steps.pool.next_prefix_len[1:4].tolist() == [11, 23, 34]
    assert steps.pool.accept_len[1:4].tolist() == [0, 2, 3]
    assert steps.pool.bonus[1:4].tolist() == [7, 8, 9]
    assert steps.pool.rejected[1:3].tolist() == [1001, 1007]


@pytest.mark.parametrize("is_all_greedy", [True, False])
def test_stale_tokens_are_the_targets_own(monkeypatch: pytest.MonkeyPatch, is_all_greedy: bool) -> None:
    """The stored token of every row is the target's top-1, whether the batch samples or not; and a batch that samples
    never hands it to the host, which would then accept greedily."""
    steps = Steps(monkeypatch, stale_token=True)
    logits = torch.randn(2 * B, 9)
    steps.verify([1, 2], [10, 20], [0, 2], next_token_logits=logits,
                 sampling_info=SimpleNamespace(is_all_greedy=is_all_greedy))  # fmt: skip
    assert steps.pool.stale is not None
    assert torch.equal(steps.pool.stale[1:3], logits.argmax(-1).view(2, B))
    assert ("target_predict" in steps.host_accepts_with) == is_all_greedy
    given = torch.arange(2 * B)
    steps.verify([1, 2], [11, 23], [0, 0], target_predict=given, next_token_logits=None, sampling_info=None)
    assert torch.equal(steps.pool.stale[1:3].flatten(), given)


def test_rounds_reach_the_counters_with_the_hosts_copy(steps: Steps) -> None:
    """By the host's auxiliary output: nothing is counted before the copy, and only rounds that committed tokens."""
    steps.prefill([1, 2])
    steps.verify([1, 2], [10, 20], [0, 2])
    result = steps.verify([2, 1], [23, 11], [3, 1])
    copied: list[torch.Tensor] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor)
        return tensor.clone()

    on_host = result.logits_output.auxiliary_device_output.copy_to_host(copy)
    assert len(copied) == 1 and steps.metrics.total.rounds == 0
    steps.verify([2, 1], [27, 13], [0, 0])  # the next round overwrites the pool's own columns
    reqs = [SimpleNamespace(customized_info=None, output_ids=[5, 6, 7]) for _ in range(2)]
    commits = [SimpleNamespace(output_index=1, token_ids=(6, 7)), None]  # the second request was retracted meanwhile
    on_host.consume(SimpleNamespace(reqs=reqs), commits)
    total = steps.metrics.total
    assert (total.rounds, total.tokens, total.relayed_rows, total.eligible_rows) == (1, 2, 1, 3)
    assert total.dropped_rows == Counter({DropReason.NOTHING_REJECTED: 2})
    assert total.accepted == Counter([1, 2, 3])
    assert reqs[0].customized_info == {RELAYED_KEY: [None, 1, None]} and reqs[1].customized_info is None


def test_planted_state_reaches_no_other_request(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Isolation through slot reuse; and the same scenario leaks when the invalidation is taken away."""

    def reuse() -> int:
        steps.prefill([4])
        steps.verify([4], [10], [0], fill=666.0)  # the plant
        steps.prefill([4])  # a new request, same slot, same position
        steps.verify([4], [11], [0])
        return steps.relayed[0]

    assert reuse() == 0
    monkeypatch.setattr(RelayPool, "invalidate", lambda pool, indices: None)
    assert reuse() == 3


@pytest.mark.parametrize("told", [True, False])
def test_first_round_after_a_hand_over_is_plain(steps: Steps, told: bool) -> None:
    """A decode server never prefills: the host's question for the first draft input empties the slot instead.

    Asked as the host asks it; without the worker's callback the same steps leak.
    """
    algorithm = DFlowAlgorithm(NAME, lambda server_args: object, supports_overlap=True)
    if told:
        algorithm.on_hand_over = steps.pool.invalidate
    steps.verify([4, 5], [10, 30], [0, 1], fill=666.0)  # the plant, beside a request that goes on
    slots, seq_lens, last = torch.tensor([4]), torch.tensor([11]), torch.tensor([8])
    batch = SimpleNamespace(req_pool_indices=slots, seq_lens=seq_lens, enable_overlap=False)
    future_map: Any = None  # not asked without overlap
    draft_input = algorithm.build_disagg_draft_input(batch, last, future_map)
    assert torch.equal(draft_input.bonus_tokens, last)
    steps.verify([4, 5], [11, 32], [0, 0])
    assert steps.relayed == [0 if told else 3, 2]


@pytest.mark.parametrize("selector", ["flush", "target", "draft", "all"])
def test_flush_and_weight_update_forget(steps: Steps, selector: str) -> None:
    """A weight update of any role, asked as the host's updater asks, and a cache flush."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    from sglang_dflow.hooks.weight_update import on_weight_update

    steps.worker.draft_model_runner = None
    steps.prefill([1])
    steps.verify([1], [10], [0])
    if selector == "flush":
        steps.worker.clear_cache_pool()
    else:
        updater = SimpleNamespace(
            tp_worker=SimpleNamespace(weight_update_runners=lambda: []), draft_worker=steps.worker
        )
        runners = SchedulerWeightUpdaterManager._select_runners(updater, selector)
        on_weight_update(runners, updater, selector)
    assert not steps.refreshed, "not before the next iteration: a draft may still run"
    steps.verify([1], [11], [0])
    assert steps.relayed == [0]
    steps.verify([1], [12], [0])
    assert steps.relayed == [3], "forgotten once, not for ever"
    assert steps.refreshed == [True], "a rescorer's codes are of the embedding that was there"


def test_target_files_stay_out_of_the_drafter(steps: Steps) -> None:
    """An update from disk has no selector and brings the target's files; one that names the drafter reaches it."""
    from sglang_dflow.hooks.weight_update import on_weight_update

    runners = [("target", 1), ("draft", 2)]
    ours, other = SimpleNamespace(draft_worker=steps.worker), SimpleNamespace(draft_worker=object())
    assert on_weight_update(runners, ours) == [("target", 1)]
    assert on_weight_update(runners, ours, "all") is None
    assert on_weight_update(runners, other) is None


def test_idle_iteration_touches_nothing(steps: Steps) -> None:
    """An idle data-parallel rank runs an empty extend: its indices are empty or stale."""
    steps.prefill([1])
    steps.verify([1], [10], [0])
    batch = steps._batch([1], extend=True, idle=True, step=lambda: None)
    steps.worker.forward_batch_generation(batch)
    steps.verify([1], [11], [0])
    assert steps.relayed == [3]


def test_no_host_read_in_the_decode_path(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """I6: one round of our overrides with every way to read a tensor on the host made to raise."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("host read in the decode path")

    steps.prefill([1, 2])
    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    steps.verify([1, 2], [10, 20], [0, 3])
    monkeypatch.undo()
    assert steps.relayed == [0, 0]


def test_without_a_pool_the_worker_is_the_hosts(steps: Steps) -> None:
    """I5: switched off at start, no override does anything of its own; switching on at run time is refused."""
    steps.worker._pool = None
    steps.verify([1], [10], [0])
    assert (steps.pool.next_prefix_len == -1).all()
    assert steps.worker.relay_state() == {"relay": "off"}
    with pytest.raises(ValueError, match="switched off at start by SGLANG_DFLOW_RELAY"):
        steps.worker.set_relay_enabled(True)
