"""Coding rate: the logarithm of the volume spanned by the features of all ranks' images.

Yu et al., Learning Diverse and Discriminative Representations via the Principle of Maximal Coding
Rate Reduction, NeurIPS 2020, arXiv:2006.08558, equation 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selftask.distributed.collectives import gather_cat_with_grad, sum_with_equal_grad, world_size
from selftask.models.precision import in_full_precision


@in_full_precision
def coding_rate(features: Tensor, *, epsilon: float) -> Tensor:
    """Return 1/2 ln det(I + D / (N * epsilon) * Z^T Z), equal on all ranks.

    If N < D, the smaller matrix Z Z^T (N, N) replaces Z^T Z; the determinant is the same.

    Args:
        features: Rows of Z on this rank, (..., B, D); N is the number of images of all ranks.
        epsilon: Squared distortion of the code.

    Returns:
        One number for each leading index, (...).
    """
    dim, num_images = features.shape[-1], features.shape[-2] * world_size()
    if num_images < dim:
        rows = gather_cat_with_grad(features.movedim(-2, 0)).movedim(0, -2)
        products = rows @ rows.mT  # (..., N, N)
    else:
        products = sum_with_equal_grad(features.mT @ features)  # (..., D, D)
    identity = torch.eye(products.shape[-1], dtype=products.dtype, device=products.device)
    return log_determinant(identity + dim / (num_images * epsilon) * products) / 2


def log_determinant(matrices: Tensor) -> Tensor:
    """Return ln det of positive definite matrices (..., n, n); the host does not wait for a GPU."""
    factor = torch.linalg.cholesky_ex(matrices).L
    return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(dim=-1)
