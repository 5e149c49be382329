"""VICReg against the figures of its authors' code, its paper as loops, and itself on two ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from selftask.methods.vicreg import VICReg
from selftask.models.losses.variance_covariance import variance_covariance

FIGURES = {"invariance": 1.3618974208411672, "variance": 0.061058607288, "covariance": 3.6015274}
LOSS, GRAD_X, GRAD_Y = 39.17542822642538, 2.9117545031574354, 3.1963644702479863


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def official_inputs() -> Tensor:
    first = draw(0, 16, 24)
    return torch.stack([first, 0.5 * first + draw(1, 16, 24)])


def method(**config: Any) -> VICReg:
    return VICReg(VICReg.Config(out_dim=24, hidden_dim=8, **config))


def test_loss_and_terms_are_those_of_the_authors_code() -> None:
    """facebookresearch/vicreg, main_vicreg.py; shared/oracles/expected.json."""
    x, y = (view.requires_grad_() for view in official_inputs().unbind())
    terms = method()(torch.stack([x, y]), None)
    assert terms["invariance"].item() == pytest.approx(25 * FIGURES["invariance"], rel=1e-9)
    assert terms["variance"].item() == pytest.approx(25 * FIGURES["variance"], rel=1e-6)
    assert terms["covariance"].item() == pytest.approx(FIGURES["covariance"], rel=1e-6)
    loss = sum(terms.values())
    assert loss.item() == pytest.approx(LOSS, rel=1e-9)
    loss.backward()
    assert x.grad.norm().item() == pytest.approx(GRAD_X, rel=1e-6)
    assert y.grad.norm().item() == pytest.approx(GRAD_Y, rel=1e-6)


def test_terms_are_those_of_the_paper() -> None:
    """Equations 1, 2 and 4 as loops."""
    x = 0.4 * draw(3, 6, 5) + 1
    rows = x.tolist()
    means = [sum(row[j] for row in rows) / 6 for j in range(5)]
    covariance = [
        [sum((row[i] - means[i]) * (row[j] - means[j]) for row in rows) / 5 for j in range(5)]
        for i in range(5)
    ]
    hinges = [max(0.0, 1 - math.sqrt(covariance[j][j] + 1e-4)) for j in range(5)]
    others = [covariance[i][j] ** 2 for i in range(5) for j in range(5) if i != j]
    actual = variance_covariance(x)
    assert actual[0].item() == pytest.approx(sum(hinges) / 5, rel=1e-12)
    assert actual[1].item() == pytest.approx(sum(others) / 5, rel=1e-12)
    stacked = variance_covariance(torch.stack([x, 2 * x]))
    doubled = variance_covariance(2 * x)
    for one, first, second in zip(stacked, actual, doubled, strict=True):
        assert one.item() == pytest.approx((first + second).item() / 2, rel=1e-12)


def test_a_collapsed_output_costs_the_whole_variance_term() -> None:
    terms = method()(torch.ones(2, 8, 24, dtype=torch.float64), None)
    assert terms["variance"].item() == pytest.approx(25 * (1 - 0.01))
    assert terms["invariance"].item() == terms["covariance"].item() == 0
