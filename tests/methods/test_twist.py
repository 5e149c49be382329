"""TWIST against the figures of its authors' code, and its extremes."""

from __future__ import annotations

import math

import pytest
import torch

from figures import draw
from minitask import loss_of
from selftask.methods.twist import TWIST, twist_terms

# bytedance/TWIST for seeds 0 and 500: divergence, entropy of images, of the mean, gradients of
# both views; multi-crop: loss, gradients of the first global and the first local view
PAIR = [
    *(
        (0.6748289430589336, 1.2223896332495348, 1.9511810800285896),
        (1.0389478811175636, 1.0361777325234, 1.963912155055974),
    ),
]
PAIR_GRADIENTS = [
    (0.1164024070511339, 0.1323148267231437),
    (0.13142566092515884, 0.12773111666810263),
]
MULTI = [
    (0.06216394204803315, 0.05643932555459922, 0.03843595299716346),
    (0.08171607740587186, 0.051243484849518094, 0.03560251480763468),
]


@pytest.mark.parametrize("case", [0, 1])
def test_loss_is_that_of_the_authors_code(case: int) -> None:
    """It adds 1e-5 to probabilities before each logarithm, which changes the fourth digit."""
    method = TWIST(TWIST.Config(temperature=0.5))
    for count, figures in ((2, PAIR_GRADIENTS[case]), (4, MULTI[case])):
        views = torch.stack([draw(500 * case + v, 12, 8) for v in range(count)]).requires_grad_()
        loss = loss_of(method, views)
        (gradient,) = torch.autograd.grad(loss, views)
        norms = gradient.norm(dim=(1, 2)).tolist()
        if count == 2:
            terms = [term.item() for term in twist_terms(views, temperature=0.5)]
            assert terms == pytest.approx(PAIR[case], rel=1e-3)
            assert norms == pytest.approx(figures, rel=3e-3)
        else:
            assert (loss.item(), norms[0], norms[2]) == pytest.approx(figures, rel=3e-3)


def test_loss_is_lowest_for_certain_equal_and_different_classes() -> None:
    """One class for each image, the same in both views: -ln K; one class for all: 0."""
    sure = 100 * torch.eye(6, dtype=torch.float64).expand(2, 6, 6)
    method = TWIST(TWIST.Config())
    assert loss_of(method, sure).item() == pytest.approx(-math.log(6), abs=1e-9)
    assert loss_of(method, sure[:, :1].expand(2, 6, 6)).item() == pytest.approx(0.0, abs=1e-9)
