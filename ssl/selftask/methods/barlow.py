"""Barlow Twins: each feature agrees with itself across views and with no other feature.

B: images per rank, W: ranks, D: width of the projector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import (
    all_reduce_sum,
    sum_with_equal_grad,
    sum_with_grad,
    world_size,
)
from selftask.methods.families.projected import Projected
from selftask.models.losses.image_products import (
    has_few_images,
    rows_of_all_ranks,
    share_of_squared_norm,
)
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("barlow")
class BarlowTwins(Projected):
    """Barlow Twins (arXiv:2103.03230): two views agree, and their features are uncorrelated.

    Loss: ``sum_i (1 - C_ii)^2 + lambda sum_(i != j) C_ij^2`` of the correlations C_ij of feature i
    of one view with feature j of the other (eq. 1).

    Published: ImageNet linear top-1 of ResNet-50 73.3 after 1000 epochs at batch 2048 (authors'
    README).

    Use it if neither a teacher nor negatives are wanted. It needs wide heads, and memory for them.

    Differs from the authors' code:

    * The ImageNet recipe scales the loss by 0.024, as the authors' code did up to commit 046eec3
      (``--scale-loss``). The newest commit, 8e8d284, has a second learning rate for biases and
      norms instead (``--learning-rate-biases``).
    """

    paper = (
        "Zbontar et al., Barlow Twins: Self-Supervised Learning via Redundancy Reduction, ICML 2021"
    )
    columns = {
        "invariance": "Term of the loss: two views have the same embedding.",
        "redundancy": "Term of the loss: components are uncorrelated.",
    }
    loss_reduction = "statistics"  # the correlation
    views = 2
    per_view = True
    min_batch_size = 2
    head_options = {"bias": False, "last_bias": False}

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(8192, min=1, tiny=16)
        """Width of the head's output, D."""
        hidden_dim: int = setting(8192, min=1, tiny=32)
        """Width of the projector's two hidden layers."""
        redundancy_weight: float = setting(0.0051, min=0)
        """Weight of the off-diagonal terms, lambda in eq. 1."""
        scale: float = setting(1.0, min=0)
        """Factor of the whole loss; 0.1 in solo-learn."""

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the two terms of eq. 1 for ``output`` (2, B, D), equal on all ranks."""
        diagonal, redundancy = correlations(output)
        invariance = (1 - diagonal).square().sum()
        scale = self.config.scale
        return {
            "invariance": scale * invariance,
            "redundancy": scale * self.config.redundancy_weight * redundancy,
        }

    @property
    def chance_loss(self) -> float:
        """Loss of a zero correlation matrix: ``scale`` * ``out_dim``."""
        return float(self.config.scale * self.config.out_dim)


EPS = 1e-5  # added to variances, as by BatchNorm


@in_full_precision
def correlations(views: Tensor) -> tuple[Tensor, Tensor]:
    """Return the diagonal (D,) of C of eq. 2, and the sum of the squares of its other entries.

    Gradients through the mean over images are omitted: they are zero, since centered features sum
    to zero.

    Args:
        views: Features of two views, (2, B, D).
    """
    if has_few_images(views):
        return _from_images(views)
    correlation = cross_correlation(views[0], views[1])  # (D, D)
    diagonal = correlation.diagonal()
    return diagonal, (correlation - diagonal.diag()).square().sum()


@in_full_precision
def cross_correlation(first: Tensor, second: Tensor) -> Tensor:
    """Return C of eq. 2: (D, D) correlations of features (B, D) of two views over all ranks."""
    views = torch.stack([first, second])
    num_images = _num_images(views)
    centered = views - all_reduce_sum(views.sum(dim=1, keepdim=True)) / num_images
    variance = sum_with_equal_grad(centered.square().sum(dim=1)) / num_images  # (2, D)
    scale = torch.rsqrt(variance + EPS)
    products = sum_with_equal_grad(centered[0].T @ centered[1]) / num_images
    return products * scale[0, :, None] * scale[1]


def _from_images(views: Tensor) -> tuple[Tensor, Tensor]:
    every, num_images = rows_of_all_ranks(views), _num_images(views)
    mean = every.mean(dim=1, keepdim=True)
    centered = views - mean
    variance = sum_with_grad(centered.square().sum(dim=1, keepdim=True)) / num_images  # (2, 1, D)
    scale = torch.rsqrt(variance + EPS)
    standardized = centered * scale
    first, second = standardized @ ((every - mean) * scale.detach()).mT  # (B, B * W)
    norm = share_of_squared_norm(first, second) / num_images**2
    diagonal = (standardized[0] * standardized[1]).sum(dim=0) / num_images
    sums = sum_with_equal_grad(torch.cat([diagonal, norm[None]]))
    return sums[:-1], sums[-1] - sums[:-1].square().sum()


def _num_images(views: Tensor) -> int:
    return views.shape[1] * world_size()
