"""FroSSL against the figures of its authors' code, and its extremes."""

from __future__ import annotations

import math

import pytest
import torch

from figures import draw
from minitask import loss_of
from selftask.methods.frossl import FroSSL, frossl_terms

# OFSkean/FroSSL, multiview, for seeds 0 and 500: loss, gradients of the first two views
MULTI: list[tuple[float, float, float]] = [
    (-0.12096195407412069, 0.2517478795865948, 0.22954669766231695),
    (-0.09872182788074446, 0.20664160945741444, 0.24914224465216547),
]
SMALL: list[tuple[float, float, float]] = [
    (13.873998602377753, 0.9920709908058224, 1.0816931098107594),
    (14.983078195823996, 0.9423948058950726, 0.9575979139585751),
]


@pytest.mark.parametrize(("rows", "figures"), [(16, MULTI), (5, SMALL)])
def test_loss_is_that_of_the_authors_code(
    rows: int, figures: list[tuple[float, float, float]]
) -> None:
    method = FroSSL(FroSSL.Config(invariance_weight=1.4))
    for seed, expected in zip((0, 500), figures, strict=True):
        output = torch.stack([draw(seed + view, rows, 10) for view in range(3)]).requires_grad_()
        loss = loss_of(method, output)
        (gradient,) = torch.autograd.grad(loss, output)
        computed = (loss.item(), *gradient[:2].norm(dim=(1, 2)).tolist())
        assert computed == pytest.approx(expected, rel=1e-9)


def test_norm_is_lowest_for_uncorrelated_features_and_0_for_one_direction() -> None:
    """2 ln |K| of each view: -ln D for equal eigenvalues 1 / D, 0 for a single one of 1."""
    basis = torch.linalg.qr(draw(1, 16, 5))[0]
    distance, norm = frossl_terms(torch.stack([basis, 3 * basis]))
    assert distance.item() == pytest.approx(0.0, abs=1e-24)
    assert norm.item() == pytest.approx(-2 * math.log(5), rel=1e-12)
    _, norm = frossl_terms(draw(1, 16, 1).expand(2, 16, 5))
    assert norm.item() == pytest.approx(0.0, abs=1e-12)
