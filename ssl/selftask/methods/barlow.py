"""Barlow Twins: each feature agrees with itself across views and with no other feature.

B: images per rank, W: ranks, D: width of the projector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import sum_with_grad, world_size
from selftask.methods.base import Method
from selftask.models.heads import mlp
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("barlow")
class BarlowTwins(Method):
    """Barlow Twins (arXiv:2103.03230): two views agree, and their features are uncorrelated.

    Differs from the authors' code:

    * The loss is scaled by 0.024, as in the code until 046eec3 (``--scale-loss``). The newest
      commit, 8e8d284, has a second learning rate for biases and norms instead
      (``--learning-rate-biases``).
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

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build the projector: three layers; the last has no BatchNorm or activation."""
        hidden = self.config.hidden_dim
        return mlp(embed_dim, hidden, hidden, self.config.out_dim, bias=False, last_bias=False)

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the two terms of eq. 1 for ``output`` (2, B, D), equal on all ranks."""
        correlation = cross_correlation(output[0], output[1])  # (D, D)
        diagonal = correlation.diagonal()  # (D,)
        invariance = (1 - diagonal).square().sum()
        redundancy = (correlation - diagonal.diag()).square().sum()
        scale = self.config.scale
        return {
            "invariance": scale * invariance,
            "redundancy": scale * self.config.redundancy_weight * redundancy,
        }

    @property
    def chance_loss(self) -> float:
        """Loss of a zero correlation matrix: ``scale`` * ``out_dim``."""
        return float(self.config.scale * self.config.out_dim)


@in_full_precision
def cross_correlation(first: Tensor, second: Tensor) -> Tensor:
    """Return C of eq. 2: (D, D) correlations of features (B, D) of two views over all ranks."""
    num_images = len(first) * world_size()
    return sum_with_grad(standardize(first).T @ standardize(second)) / num_images


def standardize(x: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Standardize the columns of (B, D) to mean 0 and variance 1 over the rows of all ranks."""
    num_rows = len(x) * world_size()
    x = x - sum_with_grad(x.sum(dim=0)) / num_rows
    variance = sum_with_grad(x.square().sum(dim=0)) / num_rows
    return x * torch.rsqrt(variance + eps)
