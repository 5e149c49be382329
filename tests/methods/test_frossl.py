"""FroSSL against the figures of its authors' code, and its extremes."""

from __future__ import annotations

import math

import pytest
import torch

from figures import draw
from minitask import loss_of
from selftask.methods.frossl import FroSSL, frossl_terms, vne_terms

# OFSkean/FroSSL, multiview, for seeds 0 and 500: loss, gradients of the first two views
MULTI: list[tuple[float, float, float]] = [
    (-0.12096195407412069, 0.2517478795865948, 0.22954669766231695),
    (-0.09872182788074446, 0.20664160945741444, 0.24914224465216547),
]
SMALL: list[tuple[float, float, float]] = [
    (13.873998602377753, 0.9920709908058224, 1.0816931098107594),
    (14.983078195823996, 0.9423948058950726, 0.9575979139585751),
]
# I-VNE+ beside it, alphas 0.9 and 1.1: loss, gradients of both views
VNE = [
    (-2.282314072789521, 0.0945333213810981, 0.08836251255303802),
    (-2.2098162149518825, 0.08519319270401918, 0.08868191667583565),
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


def test_von_neumann_entropy_is_that_of_the_authors_code() -> None:
    options = FroSSL.Config(spectrum="von_neumann", invariance_weight=0.9, spectrum_weight=1.1)
    for seed, expected in zip((0, 500), VNE, strict=True):
        output = torch.stack([draw(seed + view, 16, 10) for view in range(2)]).requires_grad_()
        loss = loss_of(FroSSL(options), output)
        (gradient,) = torch.autograd.grad(loss, output)
        computed = (loss.item(), *gradient.norm(dim=(1, 2)).tolist())
        assert computed == pytest.approx(expected, rel=1e-9)


def test_von_neumann_entropy_is_0_for_one_direction_and_ln_d_for_all() -> None:
    """With more features than images, too, whose other eigenvalues are 0."""
    basis = torch.linalg.qr(draw(1, 12, 12))[0][:5].expand(3, 5, 12).clone().requires_grad_()
    cosine, entropy = vne_terms(basis)
    assert cosine.item() == pytest.approx(-1.0, rel=1e-12)
    assert entropy.item() == pytest.approx(-math.log(5), rel=1e-9)
    (gradient,) = torch.autograd.grad(entropy, basis)
    assert gradient.isfinite().all()
    _, entropy = vne_terms(draw(1, 1, 6).expand(2, 8, 6))
    assert entropy.item() == pytest.approx(0.0, abs=1e-9)
