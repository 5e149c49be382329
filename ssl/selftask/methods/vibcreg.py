"""VIbCReg: VICReg with correlations in place of covariances, after a whitening layer.

V: views, B: images per rank, N: images of all ranks, D: width of the projector; G: groups of
features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selftask.config.fields import setting
from selftask.distributed.collectives import all_reduce_sum, sum_with_grad, world_size
from selftask.methods.vicreg import VICReg
from selftask.models.losses.variance_covariance import EPS, variance_covariance
from selftask.models.precision import in_full_precision
from selftask.registry import register_method

ITER_NORM_EPS = 1e-5  # added to variances
ITER_NORM_STEPS = 5  # of Newton's iteration, T
ITER_NORM_MOMENTUM = 0.1  # share of a batch in the running averages, as in BatchNorm


@register_method("vibcreg")
class VIbCReg(VICReg):
    """VIbCReg (arXiv:2109.00783): VICReg on whitened features, with correlations, not covariances.

    Loss: ``25 |z1 - z2|^2 / D + 25 mean max(0, 1 - std) + 200 sum_(i != j) R_ij^2 / D^2`` by
    default, of the whitened features z1 and z2 of two views, and their standard deviations and
    correlations R over images.

    Use it in place of ``vicreg`` if its weights are hard to choose.

    Differs from the authors' code:

    * Statistics, including those of IterNorm, are over the images of all ranks.
    """

    paper = (
        "Lee and Aune, VIbCReg: Variance-Invariance-better-Covariance Regularization for "
        "Self-Supervised Learning on Time Series, 2021"
    )
    head_options = {}

    @dataclass(frozen=True, kw_only=True)
    class Config(VICReg.Config):
        out_dim: int = setting(2048, min=1, tiny=16)
        """Width of the head's output, D."""
        hidden_dim: int = setting(2048, min=1, tiny=32)
        """Width of the projector's two hidden layers."""
        group_width: int = setting(64, min=1, tiny=4)
        """Number of features that IterNorm decorrelates together; a divisor of ``out_dim``."""
        covariance_weight: float = setting(200.0, min=0)
        """Weight of the covariance term, nu."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if self.out_dim % self.group_width:
                yield (
                    f"group_width: {self.out_dim} features (out_dim) cannot be divided into "
                    f"groups of {self.group_width}"
                )

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build the projector: three layers, and IterNorm."""
        projector: Any = super().build_head(embed_dim)
        return projector.append(IterNorm(self.config.out_dim, self.config.group_width))

    def spread(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return the unweighted variance and correlation terms, both summed over views."""
        return variance_correlation(views)


@in_full_precision
def variance_correlation(views: Tensor) -> tuple[Tensor, Tensor]:
    """Return the variance and the correlation term, computed over the images of all ranks.

    Args:
        views: (V, B, D).

    Returns:
        The mean of max(0, 1 - std) over features, and the sum of the squared correlations between
        different features, divided by D * D. Both are summed over views.
    """
    num_images = views.shape[1] * world_size()
    centered = views - all_reduce_sum(views.sum(dim=1, keepdim=True)) / num_images
    squares = sum_with_grad(centered.square().sum(dim=1, keepdim=True))  # (V, 1, D)
    variance = squares / (num_images - 1)
    hinge = (1 - (variance + EPS).sqrt()).relu().mean(dim=(1, 2)).sum()
    standardized = centered * variance.clamp(min=torch.finfo(variance.dtype).tiny).rsqrt()
    _, correlation = variance_covariance(standardized)  # a mean over views, divided by D
    return hinge, correlation * len(views) / views.shape[-1]


class IterNorm(nn.Module):
    """Layer that whitens groups of features (N, D) approximately, with statistics of all ranks.

    Huang et al., Iterative Normalization, CVPR 2019, arXiv:1904.03441: whitening by Newton's
    iteration. Like BatchNorm, it uses running averages in evaluation mode, and ends with a trained
    scale and shift.

    Args:
        num_features: Width, D.
        group_width: Number of features that are decorrelated together; a divisor of D.
    """

    def __init__(self, num_features: int, group_width: int) -> None:
        super().__init__()
        groups = num_features // group_width
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(groups, 1, group_width))
        self.register_buffer("running_whitening", torch.eye(group_width).repeat(groups, 1, 1))

    running_mean: Tensor
    running_whitening: Tensor

    @in_full_precision
    def forward(self, features: Tensor) -> Tensor:
        groups, _, width = self.running_mean.shape
        x = features.view(-1, groups, width).transpose(0, 1)  # (G, N, D / G)
        if self.training:
            mean, whitening = self._statistics(x)
        else:
            mean, whitening = self.running_mean, self.running_whitening
        white = (x - mean) @ whitening
        return white.transpose(0, 1).reshape(features.shape) * self.weight + self.bias

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and the whitening matrices of a batch, and update the averages."""
        num_images = x.shape[1] * world_size()
        mean = sum_with_grad(x.sum(dim=1, keepdim=True)) / num_images
        centered = x - mean
        covariance = sum_with_grad(centered.mT @ centered) / num_images
        whitening = newton_inverse_root(covariance, ITER_NORM_STEPS)
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), ITER_NORM_MOMENTUM)
            self.running_whitening.lerp_(
                whitening.to(self.running_whitening.dtype), ITER_NORM_MOMENTUM
            )
        return mean, whitening


def newton_inverse_root(covariance: Tensor, iterations: int) -> Tensor:
    """Return approximate inverse square roots of covariance matrices (..., n, n)."""
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    matrix = covariance + ITER_NORM_EPS * identity
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[..., None, None]
    matrix, root = matrix / trace, identity.expand_as(matrix)
    for _ in range(iterations):
        root = 1.5 * root - 0.5 * root @ root @ root @ matrix
    return root * trace.rsqrt()
