"""Alignment and uniformity: a contrastive loss with two separate terms.

Wang and Isola, Understanding Contrastive Representation Learning through Alignment and Uniformity
on the Hypersphere, ICML 2020, arXiv:2005.10242.

V: views, B: images per rank, W: ranks, D: width of the head's output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import gather_cat_with_grad
from selftask.methods.base import Method
from selftask.models.heads import mlp
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("align_uniform")
class AlignUniform(Method):
    """Close views of the same image, and all images spread over the unit sphere."""

    loss_reduction = "gathered"  # distances to the images of all ranks
    views = 2
    min_batch_size = 2  # uniformity compares images

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(128, min=2, tiny=16)  # D
        hidden_dim: int = setting(512, min=1, tiny=32)  # width of the projector's hidden layer
        alpha: float = setting(2.0, above=0)  # power of the distance in eq. 5
        t: float = setting(2.0, above=0)  # parameter of the Gaussian potential in eq. 6
        weight: float = setting(1.0, min=0)  # of uniformity; lambda in appendix B of the paper

    def build_head(self, embed_dim: int) -> nn.Module:
        """Return a projector of two layers."""
        return mlp(embed_dim, self.config.hidden_dim, self.config.out_dim)

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return eq. 5 and the weighted eq. 6; ``output`` (2, B, D)."""
        align, uniform = alignment_uniformity(*output, alpha=self.config.alpha, t=self.config.t)
        return {"align": align, "uniform": self.config.weight * uniform}

    @property
    def chance_loss(self) -> float | None:
        """None: the loss crosses zero, so its ratio to the chance loss would be meaningless."""
        return None


@in_full_precision
def alignment_uniformity(
    first: Tensor, second: Tensor, *, alpha: float, t: float
) -> tuple[Tensor, Tensor]:
    """Return the two terms of the loss for the images of all ranks; the inputs are (B, D).

    Both are the same on every rank, so the mean of the ranks' gradients is that of the whole batch.
    """
    x, y = (gather_cat_with_grad(F.normalize(view, dim=1)) for view in (first, second))  # (WB, D)
    align = (x - y).square().sum(dim=1).clamp(min=1e-12).pow(alpha / 2).mean()
    uniform = (_potential(x, t) + _potential(y, t)) / 2
    return align, uniform


def _potential(x: Tensor, t: float) -> Tensor:
    """Return the log of the mean Gaussian potential over pairs of different rows of x (N, D)."""
    num_rows = len(x)
    squared = (2 - 2 * x @ x.T).clamp(min=0)  # (N, N)
    pairs = squared.fill_diagonal_(math.inf).mul(-t)  # exp(-inf) = 0: no row with itself
    return pairs.flatten().logsumexp(0) - math.log(num_rows * (num_rows - 1))
