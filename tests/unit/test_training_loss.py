"""Position-decayed cross entropy."""

from __future__ import annotations

import math

import torch

from sglang_dflow.training.loss import block_loss, full_vocabulary, row_weights, sampled_vocabulary, tau_estimate


def test_weights_decay_from_the_first_mask() -> None:
    """Catches an off-by-one in the decay: row 1 weighs 1, the anchor nothing."""
    weights = row_weights(4, gamma=2.0).tolist()
    expected = [0.0, 1.0, math.exp(-0.5), math.exp(-1.0)]
    assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(weights, expected))


def test_fused_loss_and_gradient_equal_autograd() -> None:
    """Catches an error in the hand-made backward, chunking included."""
    torch.manual_seed(0)
    head = torch.randn(11, 6)
    hidden = torch.randn(3, 4, 6, requires_grad=True)
    labels = torch.randint(0, 11, (3, 4))
    valid = torch.rand(3, 4) > 0.3
    loss = block_loss(hidden, labels, valid, full_vocabulary(head), gamma=2.0, chunk=4).loss
    (2 * loss).backward()
    got = hidden.grad
    twin = hidden.detach().clone().requires_grad_()
    weights = (row_weights(4, 2.0) * valid)[:, 1:]
    each = -torch.log_softmax(twin @ head.T, -1).gather(-1, labels[..., None])[:, 1:, 0]
    expected = (each * weights).sum() / weights.sum()
    (2 * expected).backward()
    assert torch.allclose(loss, expected, atol=1e-5)
    assert got is not None and twin.grad is not None and torch.allclose(got, twin.grad, atol=1e-5)


def test_rows_without_label_do_not_count() -> None:
    """Catches padding behind the end of an answer leaking into the loss."""
    torch.manual_seed(0)
    head, hidden = torch.randn(11, 6), torch.randn(1, 4, 6)
    valid = torch.tensor([[True, True, True, False]])
    first = block_loss(hidden, torch.tensor([[1, 2, 3, 4]]), valid, full_vocabulary(head), 4.0).loss
    second = block_loss(hidden, torch.tensor([[9, 2, 3, 10]]), valid, full_vocabulary(head), 4.0).loss
    assert torch.equal(first, second)


def test_sampled_vocabulary_estimates_the_full_sum() -> None:
    """Catches a wrong importance correction: the mean sampled partition function must meet the full one."""
    torch.manual_seed(0)
    head, hidden = torch.randn(200, 4), torch.randn(4)
    always = torch.zeros(200, dtype=torch.bool)
    always[:20] = True
    generator = torch.Generator().manual_seed(1)
    sums = []
    for _ in range(400):
        vocabulary = sampled_vocabulary(head, always, torch.tensor([50, 60]), 30, generator)
        sums.append((vocabulary.head @ hidden + vocabulary.bias).exp().sum())
        assert vocabulary.ids[vocabulary.rows_of(torch.tensor([50, 60]))].tolist() == [50, 60]
    full = (head @ hidden).exp().sum()
    assert abs(torch.stack(sums).mean() / full - 1) < 0.05


def test_tau_counts_the_prefix_and_the_bonus() -> None:
    """Catches counting right drafts behind a wrong one."""
    correct = torch.tensor([[True, False, True], [True, True, True]])
    assert tau_estimate(correct, torch.ones_like(correct)) == 1 + (1 + 3) / 2
