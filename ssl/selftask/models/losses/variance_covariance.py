"""Variance and covariance terms of VICReg over the global batch; they prevent a collapse.

Bardes et al., VICReg: Variance-Invariance-Covariance Regularization for Self-Supervised Learning,
ICLR 2022, arXiv:2105.04906, equations 1 to 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selftask.distributed.collectives import all_reduce_sum, sum_with_equal_grad, world_size
from selftask.models.losses.image_products import (
    has_few_images,
    rows_of_all_ranks,
    share_of_squared_norm,
)
from selftask.models.precision import in_full_precision

EPS = 1e-4  # added to variances, as in the paper


def variance_covariance(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the variance and the covariance term of features.

    A loss must weight them by the same numbers on all ranks.

    Args:
        features: (..., B, D) for B images of this rank. Statistics are over the images of all
            ranks, separately for each leading index; terms are means over the leading indices.

    Returns:
        The mean over features of max(0, 1 - sqrt(variance + 1e-4)) (equation 1), and the sum of
        squared covariances between different features, divided by D (equation 4).
    """
    variance, covariance = variances_covariances(features)
    return variance.mean(), covariance.mean()


@in_full_precision
def variances_covariances(features: Tensor, every: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the terms of ``variance_covariance`` of each leading index, (...) each.

    Args:
        features: (..., B, D) for B images of this rank.
        every: Features of the images of all ranks, (..., B * W, D), if known. If None, they are
            gathered, but only if this takes less traffic than an all-reduce of covariances.
    """
    if has_few_images(features):
        every = rows_of_all_ranks(features) if every is None else every.detach()
        variance, others = _from_images(features, every)
    else:
        variance, others = _from_features(features)
    hinge = (1 - (variance + EPS).sqrt()).relu().mean(dim=-1)
    return hinge, others / features.shape[-1]


# The mean of the images may be detached: its gradient is 0, since centered features sum to 0.


def _from_images(features: Tensor, every: Tensor) -> tuple[Tensor, Tensor]:
    """Return variances (..., D), and the sum of squared covariances of different features (...)."""
    mean = every.mean(dim=-2, keepdim=True)
    centered = features - mean
    products = centered @ (every - mean).mT  # (..., B, B * W)
    norm = share_of_squared_norm(products, products)
    sums = sum_with_equal_grad(torch.cat([centered.square().sum(dim=-2), norm[..., None]], dim=-1))
    degrees = every.shape[-2] - 1
    variance = sums[..., :-1] / degrees
    return variance, sums[..., -1] / degrees**2 - variance.square().sum(dim=-1)


def _from_features(features: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the result of ``_from_images`` from the covariances (..., D, D)."""
    num_images = features.shape[-2] * world_size()
    centered = features - all_reduce_sum(features.sum(dim=-2, keepdim=True)) / num_images
    covariance = sum_with_equal_grad(centered.mT @ centered) / (num_images - 1)  # (..., D, D)
    variance = covariance.diagonal(dim1=-2, dim2=-1)  # (..., D)
    others = covariance - torch.diag_embed(variance)
    return variance, others.square().sum(dim=(-2, -1))
