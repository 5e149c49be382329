"""Zero-CL against the paper's steps in NumPy, and its extremes. No authors' figures exist."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from figures import draw
from minitask import loss_of
from selftask.methods.zerocl import ZeroCL, whiten, zerocl_terms
from selftask.models.losses.polar import inverse_root


def term(first: np.ndarray, second: np.ndarray) -> float:
    """Of the rows of two matrices: standardize, whiten by eigenvectors, compare."""
    white = []
    for rows in (first, second):
        rows = (rows - rows.mean(axis=1, keepdims=True)) / np.sqrt(
            rows.var(axis=1, keepdims=True) + 1e-5
        )
        matrix = 0.9 * np.cov(rows) + 0.1 * np.eye(len(rows))
        values, vectors = np.linalg.eigh(matrix)
        white.append(vectors @ np.diag(values**-0.5) @ vectors.T @ rows)
    return sum((1 - np.mean(a * b)) ** 2 for a, b in zip(*white, strict=True))


@pytest.mark.parametrize("shape", [(2, 12, 5), (2, 5, 12)])
def test_terms_are_those_of_the_paper(shape: tuple[int, ...]) -> None:
    """Of more and fewer images than features: one of both matrices is singular."""
    output = draw(1, *shape)
    first, second = output.numpy()
    features, instances = zerocl_terms(output, shrinkage=0.1)
    assert features.item() == pytest.approx(term(first.T, second.T), rel=1e-9)
    assert instances.item() == pytest.approx(term(first, second), rel=1e-9)
    method = ZeroCL(ZeroCL.Config(instance_weight=3.0, shrinkage=0.1))
    weighted = loss_of(method, output).item()
    assert weighted == pytest.approx(features.item() + 3 * instances.item(), rel=1e-9)


def test_gradient_does_not_pass_the_whitening_matrix() -> None:
    """It is that of the product with a fixed matrix."""
    vectors = draw(2, 1, 3, 8).requires_grad_()
    weights = draw(3, 1, 3, 8)
    (gradient,) = torch.autograd.grad((whiten(vectors, 0.1) * weights).sum(), vectors)
    fixed = vectors.detach()[0]
    matrix = inverse_root(0.9 * fixed @ fixed.T / 7 + 0.1 * torch.eye(3).double())
    torch.testing.assert_close(gradient[0], matrix @ weights[0], rtol=1e-10, atol=1e-12)


def test_loss_is_near_zero_for_equal_views_and_large_for_others() -> None:
    """White features that agree have the correlation (n - 1) / n; opposite ones about -1."""
    views = draw(1, 1, 400, 4).expand(2, -1, -1)
    features, _ = zerocl_terms(views, shrinkage=1e-9)
    assert features.item() == pytest.approx(4 / 400**2, rel=1e-3)
    features, _ = zerocl_terms(views * torch.tensor([1.0, -1.0])[:, None, None], shrinkage=1e-9)
    assert features.item() == pytest.approx(4 * (2 - 1 / 400) ** 2, rel=1e-3)


def test_inverse_root_and_its_gradient_are_those_of_eigenvectors() -> None:
    rows = draw(4, 2, 9, 5)
    matrices = (rows.mT @ rows / 9 + 0.01 * torch.eye(5).double()).requires_grad_()
    values, vectors = torch.linalg.eigh(matrices)
    expected = vectors @ torch.diag_embed(values.rsqrt()) @ vectors.mT
    root = inverse_root(matrices)
    torch.testing.assert_close(root, expected, rtol=1e-9, atol=1e-10)
    weights = draw(5, 2, 5, 5)
    weights = weights + weights.mT
    ours, theirs = (torch.autograd.grad((x * weights).sum(), matrices)[0] for x in (root, expected))
    symmetric = (ours + ours.mT) / 2  # of a symmetric matrix either triangle may be read
    torch.testing.assert_close(symmetric, (theirs + theirs.mT) / 2, rtol=1e-7, atol=1e-8)
