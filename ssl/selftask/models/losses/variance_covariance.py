"""Variance and covariance terms of VICReg over the global batch; they prevent a collapse.

Bardes et al., VICReg: Variance-Invariance-Covariance Regularization for Self-Supervised Learning,
ICLR 2022, arXiv:2105.04906, equations 1 to 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selftask.distributed.collectives import sum_with_grad, world_size
from selftask.models.precision import in_full_precision

EPS = 1e-4  # added to variances, as in the paper


@in_full_precision
def variance_covariance(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the variance and the covariance term of features.

    Args:
        features: (..., B, D) for B images of this rank. Statistics are over the images of all
            ranks, separately for each leading index; terms are means over the leading indices.

    Returns:
        The mean hinge of 1 on the standard deviation of each feature (equation 1), and the sum of
        squared covariances between different features, divided by D (equation 4).
    """
    num_images = features.shape[-2] * world_size()
    mean = sum_with_grad(features.sum(dim=-2, keepdim=True)) / num_images
    centered = features - mean
    covariance = sum_with_grad(centered.mT @ centered) / (num_images - 1)  # (..., D, D)
    variance = covariance.diagonal(dim1=-2, dim2=-1)  # (..., D)
    hinge = (1 - (variance + EPS).sqrt()).relu().mean()
    others = covariance - torch.diag_embed(variance)
    return hinge, others.square().sum(dim=(-2, -1)).mean() / features.shape[-1]
