"""Polar factors, nuclear norms and inverse roots by products and Cholesky factors alone.

A singular value decomposition makes the host wait for a GPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

STEPS = 6  # converges from a smallest singular value of 1e-16


def nuclear_norm(matrices: Tensor) -> Tensor:
    """Return the nuclear norms (...) of matrices (..., n, m); the gradient is the polar factor."""
    return (polar_factor(matrices.detach()) * matrices).sum(dim=(-2, -1))


def inverse_root(matrices: Tensor) -> Tensor:
    """Return the symmetric inverse square roots of positive definite matrices (..., n, n).

    For A = L @ L.T, the result is L^-T times the polar factor of L.T.
    """
    root = torch.linalg.cholesky_ex(matrices).L.mT
    return torch.linalg.solve_triangular(root, polar_factor(root), upper=True)


def rounding_of(matrices: Tensor) -> Tensor:
    """Return trace times machine epsilon of matrices (..., n, n): (..., 1, 1), without gradient.

    Added to the diagonal of a singular covariance matrix, it keeps the Cholesky factor finite.
    """
    trace = matrices.detach().diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    return torch.finfo(matrices.dtype).eps * trace[..., None, None]


def polar_factor(matrices: Tensor) -> Tensor:
    """Return U @ V.T of the singular value decomposition U @ S @ V.T.

    Dynamically weighted Halley iteration (Nakatsukasa and Bai, Halley's method for the matrix sign
    function and polar decomposition, SIAM 2010): X <- X (a + b X^T X) (1 + c X^T X)^-1, with the
    weights that are optimal for singular values between a lower bound and 1, after division by the
    Frobenius norm. The bound is the square root of the machine epsilon. Singular values above it
    become 1; smaller ones may end between 0 and 1.

    Args:
        matrices: (..., n, m).

    Returns:
        (..., n, m).
    """
    if matrices.shape[-2] < matrices.shape[-1]:
        return polar_factor(matrices.mT).mT
    tiny, precision = torch.finfo(matrices.dtype).tiny, torch.finfo(matrices.dtype).eps
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=tiny)
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    bound = math.sqrt(precision)
    for _ in range(STEPS):
        a, b, c = _weights(bound)
        bound = min(1.0, bound * (a + b * bound**2) / (1 + c * bound**2))
        factor = torch.linalg.cholesky_ex(torch.add(identity, x.mT @ x, alpha=c)).L
        x = torch.add(b / c * x, torch.cholesky_solve(x.mT, factor).mT, alpha=a - b / c)
    return x


def _weights(bound: float) -> tuple[float, float, float]:
    """Return a, b and c of one step, for singular values between ``bound`` and 1."""
    d = (4 * (1 - bound**2) / bound**4) ** (1 / 3)
    root = math.sqrt(1 + d)
    a = root + math.sqrt(max(8 - 4 * d + 8 * (2 - bound**2) / (bound**2 * root), 0.0)) / 2
    b = (a - 1) ** 2 / 4
    return a, b, a + b - 1
