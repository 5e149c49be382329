"""VICReg: views agree, each feature varies over the batch, and features are uncorrelated.

B: images per rank, D: width of the projector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.families.projected import Projected
from selftask.models.losses.variance_covariance import variance_covariance
from selftask.models.precision import to_float32
from selftask.registry import register_method


@register_method("vicreg")
class VICReg(Projected):
    """VICReg (arXiv:2105.04906): two views agree, and features vary and are uncorrelated.

    Loss: ``lambda |z1 - z2|^2 / D + mu mean max(0, 1 - std) + nu sum_(i != j) cov_ij^2 / D`` of the
    features z1 and z2 of two views, and their standard deviations and covariances over images (eq.
    6, with a mean of squares as in the authors' code).

    Published: ImageNet linear top-1 of ResNet-50 73.2 (authors' README).

    Use it if neither a teacher nor negatives are wanted.
    """

    paper = (
        "Bardes et al., VICReg: Variance-Invariance-Covariance Regularization for "
        "Self-Supervised Learning, ICLR 2022"
    )
    columns = {
        "invariance": "Term of the loss: two views have the same embedding.",
        "variance": "Term of the loss: components vary over images.",
        "covariance": "Term of the loss: components are uncorrelated.",
    }
    loss_reduction = "statistics"  # variances and covariances
    views = 2
    per_view = True
    min_batch_size = 2
    head_options = {"last_bias": False}

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(8192, min=1, tiny=16)
        """Width of the head's output, D."""
        hidden_dim: int = setting(8192, min=1, tiny=32)
        """Width of the projector's two hidden layers."""
        invariance_weight: float = setting(25.0, min=0)
        """Weight of the invariance term, lambda in eq. 6."""
        variance_weight: float = setting(25.0, min=0)
        """Weight of the variance term, mu."""
        covariance_weight: float = setting(1.0, min=0)
        """Weight of the covariance term, nu."""

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the weighted terms of eq. 6 for ``output`` (2, B, D); see ``spread``."""
        config, views = self.config, to_float32(output)
        variance, covariance = self.spread(views)
        return {
            "invariance": config.invariance_weight * F.mse_loss(views[0], views[1]),
            "variance": config.variance_weight * variance,
            "covariance": config.covariance_weight * covariance,
        }

    def spread(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return the unweighted variance and covariance terms for views (2, B, D).

        As in the authors' code, the former is a mean over views, and the latter a sum.
        """
        variance, covariance = variance_covariance(views)
        return variance, 2 * covariance
