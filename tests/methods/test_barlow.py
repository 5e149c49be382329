"""Barlow Twins against its paper, lightly and itself on two ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minitask import MiniTask, loss_of
from selftask.methods.barlow import BarlowTwins, cross_correlation

SMALL: dict[str, Any] = {"out_dim": 5, "hidden_dim": 7, "redundancy_weight": 0.02}


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _method(**config: Any) -> BarlowTwins:
    return BarlowTwins(BarlowTwins.Config(**{**SMALL, **config}))


def _paper_correlation(first: Tensor, second: Tensor, i: int, j: int) -> float:
    """Eq. 2 of features that are centered along the batch, as the paper assumes."""
    a = [x - first[:, i].mean().item() for x in first[:, i].tolist()]
    b = [x - second[:, j].mean().item() for x in second[:, j].tolist()]
    lengths = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths


def test_loss_is_that_of_the_paper() -> None:
    """Eq. 1 and 2, as loops; ours differs by the 1e-5 that BatchNorm adds to each variance."""
    output = 30 * _random(2, 8, 5) + 4
    loss = 0.0
    for i in range(5):
        for j in range(5):
            c = _paper_correlation(output[0], output[1], i, j)
            loss += (1 - c) ** 2 if i == j else 0.02 * c**2
    ours = loss_of(_method(scale=0.1), output)
    assert ours.item() == pytest.approx(0.1 * loss, rel=1e-6)


def test_loss_is_that_of_lightly() -> None:
    """And its gradients, which flow through mean and variance."""
    BarlowTwinsLoss = pytest.importorskip("lightly.loss").BarlowTwinsLoss
    output = _random(2, 16, 5).float().requires_grad_()
    theirs = BarlowTwinsLoss(lambda_param=0.02)(output[0], output[1])
    method = _method()
    ours = loss_of(method, output)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    actual, expected = (torch.autograd.grad(loss, output)[0] for loss in (ours, theirs))
    assert torch.allclose(actual, expected, rtol=1e-3, atol=1e-5)
    on_diagonal = BarlowTwinsLoss(lambda_param=0.0)(output[0], output[1])
    terms = method(output, None)
    assert terms["invariance"].item() == pytest.approx(on_diagonal.item(), rel=1e-5)


def test_loss_is_zero_for_the_same_features_without_redundancy() -> None:
    """Orthogonal columns of mean zero, the same in both views up to scale and shift."""
    basis = torch.linalg.qr(torch.cat([torch.ones(16, 1).double(), _random(16, 5)], 1))[0][:, 1:]
    output = torch.stack([100 * basis, 300 * basis + 7])
    assert loss_of(_method(), output).item() == pytest.approx(0.0, abs=1e-8)


def test_a_dead_feature_costs_its_invariance_and_gives_finite_gradients() -> None:
    output = _random(2, 8, 5)
    output[:, :, 2] = 1.0
    output.requires_grad_()
    method = _method()
    loss_of(method, output).backward()
    assert output.grad is not None
    assert output.grad.isfinite().all()
    assert cross_correlation(output[0], output[1])[2].abs().max() < 1e-9


def test_batch_norm_of_the_projector_sees_one_view_at_a_time() -> None:
    """The published code passes each view by itself: eq. 2 of projections made so."""
    task = MiniTask("barlow", SMALL)
    task.views = [view + place for place, view in enumerate(task.views)]
    network, projections = task.base_model, []
    for view in task.views:
        x = network.backbone(view[:8])
        for layer in network.head:
            if isinstance(layer, nn.BatchNorm1d):
                x = (x - x.mean(dim=0)) / (x.var(dim=0, correction=0) + 1e-5).sqrt()
            else:
                x = layer(x)
        projections.append((x - x.mean(dim=0)) / (x.var(dim=0, correction=0) + 1e-5).sqrt())
    correlation = projections[0].T @ projections[1] / 8
    invariance = (correlation.diagonal() - 1).square().sum()
    others = correlation.square().sum() - correlation.diagonal().square().sum()
    assert task.run(1).losses == pytest.approx([float(invariance + 0.02 * others)], rel=1e-9)


def test_chance_is_the_loss_of_no_correlation() -> None:
    """Two views whose features all point along different directions of the batch."""
    basis = torch.linalg.qr(torch.cat([torch.ones(16, 1).double(), _random(16, 10)], 1))[0]
    output = torch.stack([basis[:, 1:6], basis[:, 6:]])
    method = _method(scale=0.1)
    assert loss_of(method, output).item() == pytest.approx(method.chance_loss)


def test_the_loss_is_not_rounded_under_autocast() -> None:
    output = _random(2, 16, 5).float()
    expected = loss_of(_method(), output)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss_of(_method(), output), expected)
