"""EMP-SSL against the figures of its authors' code, and determinants of torch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from figures import draw
from minitask import loss_of
from selftask.methods.empssl import EMPSSL
from selftask.models.losses.coding_rate import coding_rate

# tsb0601/EMP-SSL for seeds 0 and 500: loss, gradients of the first two of five views. lightly's
# loss adds the coding rate: -82.311 for seed 0.
FIGURES = [
    (-94.18715055069804, 4.220050659046438, 4.708233177114261),
    (-80.89932939396977, 4.279012871172814, 4.12464995786615),
]
RATES = (5.938107100225309, 5.961515863197419)


@pytest.mark.parametrize("case", [0, 1])
def test_loss_is_that_of_the_authors_code(case: int) -> None:
    method = EMPSSL(EMPSSL.Config())
    output = torch.stack([draw(500 * case + view, 10, 8) for view in range(5)]).requires_grad_()
    loss = loss_of(method, output)
    (gradient,) = torch.autograd.grad(loss, output)
    norms = gradient[:2].norm(dim=(1, 2)).tolist()
    assert (loss.item(), *norms) == pytest.approx(FIGURES[case], rel=1e-9)
    rate = coding_rate(F.normalize(output, dim=2), epsilon=0.2).mean().item()
    assert rate == pytest.approx(RATES[case], rel=1e-9)


@pytest.mark.parametrize("shape", [(3, 9, 6), (3, 6, 9)])
def test_coding_rate_is_that_of_the_covariance(shape: tuple[int, ...]) -> None:
    """Of the (D, D) product, with fewer images than features, too; with its gradient."""
    features = draw(4, *shape).requires_grad_()
    _, rows, dim = shape
    products = features.mT @ features * dim / (rows * 0.3)
    expected = torch.logdet(torch.eye(dim, dtype=torch.float64) + products) / 2
    rate = coding_rate(features, epsilon=0.3)
    torch.testing.assert_close(rate, expected, rtol=1e-12, atol=0)
    ours, theirs = (torch.autograd.grad(value.sum(), features)[0] for value in (rate, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


def test_loss_is_least_for_views_that_agree_and_images_that_are_orthogonal() -> None:
    """Coding rates D / 2 ln(1 + 1 / eps), and 1/2 ln(1 + D / eps) if all images are equal."""
    method = EMPSSL(EMPSSL.Config())
    views = torch.eye(8, dtype=torch.float64).expand(3, 8, 8)
    assert loss_of(method, views).item() == pytest.approx(-200 - 4 * math.log(6), rel=1e-12)
    collapsed = draw(1, 8).expand(3, 8, 8)
    assert loss_of(method, collapsed).item() == pytest.approx(-200 - math.log(41) / 2, rel=1e-12)
