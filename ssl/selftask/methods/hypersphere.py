"""Alignment and uniformity: views of an image are close, and images fill the unit sphere.

V: views, B: images per rank, N: images of all ranks, D: width of the head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import gather_cat_with_grad
from selftask.methods.families.batch_contrast import BatchContrast
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("hypersphere")
class Hypersphere(BatchContrast):
    """Alignment and uniformity (arXiv:2005.10242): views are close, images spread on a sphere.

    Loss: ``mean |x - y|^alpha + w ln mean exp(-t |x_i - x_j|^2)`` of the unit vectors x and y of
    two views, over images, and over pairs of images i and j; w is ``uniformity_weight``.

    Use it to monitor alignment and uniformity as separate terms.

    Differs from the authors' code:

    * Uniformity is over all pairs of images of all ranks.
    """

    paper = (
        "Wang and Isola, Understanding Contrastive Representation Learning through Alignment and "
        "Uniformity on the Hypersphere, ICML 2020"
    )
    columns = {
        "alignment": "Term of the loss: distance between the views of an image.",
        "uniformity": "Term of the loss: images are spread over the sphere.",
    }

    @dataclass(frozen=True, kw_only=True)
    class Config(BatchContrast.Config):
        norm: bool = False
        """Whether both layers of the head have BatchNorm."""
        alignment_power: float = setting(2.0, above=0)
        """Power of the distance between views, alpha."""
        uniformity_scale: float = setting(2.0, above=0)
        """Scale of the Gaussian kernel, t."""
        alignment_weight: float = setting(1.0, min=0)
        """Weight of alignment."""
        uniformity_weight: float = setting(1.0, min=0)
        """Weight of uniformity."""

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return both weighted terms for ``output`` (2, B, D), not necessarily normalized."""
        config = self.config
        return {
            "alignment": config.alignment_weight * alignment(output, power=config.alignment_power),
            "uniformity": config.uniformity_weight
            * uniformity(output, scale=config.uniformity_scale),
        }


@in_full_precision
def alignment(output: Tensor, *, power: float) -> Tensor:
    """Return the mean of |x - y|^power over this rank's images, for unit vectors x and y.

    Args:
        output: (2, B, D), not necessarily normalized.
        power: alpha.
    """
    first, second = F.normalize(output, dim=2)
    return (first - second).square().sum(dim=1).clamp(min=1e-24).pow(power / 2).mean()


@in_full_precision
def uniformity(output: Tensor, *, scale: float) -> Tensor:
    """Return log of the mean of exp(-scale |x_i - x_j|^2) over pairs i < j, a mean over views.

    Every rank computes the value for all images.

    Args:
        output: (V, B, D), not necessarily normalized.
        scale: t.
    """
    views = [gather_cat_with_grad(view) for view in F.normalize(output, dim=2)]  # (N, D) each
    means = []
    for view in views:
        kernel = -scale * (2 - 2 * view @ view.T)
        same = torch.eye(len(view), dtype=torch.bool, device=view.device)
        pairs = len(view) * (len(view) - 1)
        means.append(kernel.masked_fill(same, -torch.inf).flatten().logsumexp(0) - math.log(pairs))
    return torch.stack(means).mean()
