"""Zero-CL: views agree after whitening over images, and after whitening over features.

B: images per rank, N: images of all ranks, D: width of the projector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import gather_cat_with_grad
from selftask.methods.families.projected import Projected
from selftask.models.losses.polar import inverse_root
from selftask.models.precision import in_full_precision
from selftask.registry import register_method

EPS = 1e-5  # added to variances, as by BatchNorm


@register_method("zerocl")
class ZeroCL(Projected):
    """Zero-CL (OpenReview:RAW9tCdVxLj): views agree after whitening of features, and of images.

    Loss: ``sum (1 - c)^2`` of the correlations c of two views, after whitening of features, and of
    images.

    Use it to study whitening; both matrices are computed from the batch of all ranks.

    Differs from the authors' code:

    * Features and images are whitened, as in the paper; the authors' script for ImageNet whitens
      only one of them.
    * Statistics are over the images of all ranks; in the authors' code, over each rank's own.
    * 1e-5 is added to variances; in the authors' code, 1e-4 to standard deviations.
    """

    paper = (
        "Zhang et al., Zero-CL: Instance and Feature Decorrelation for Negative-Free Symmetric "
        "Contrastive Learning, ICLR 2022"
    )
    columns = {
        "features": "Term of the loss: white features of two views have the correlation 1.",
        "instances": "Term of the loss: white images of two views have the correlation 1.",
    }
    loss_reduction = "gathered"  # images are whitened together
    views = 2
    per_view = True
    min_batch_size = 2
    head_options = {"bias": False, "last_bias": False}

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(256, min=2, tiny=6)
        """Width of the head's output, D."""
        hidden_dim: int = setting(2048, min=1, tiny=32)
        """Width of the projector's two hidden layers."""
        instance_weight: float = setting(1.0, min=0)
        """Weight of the agreement of images; the agreement of features has the weight 1."""
        shrinkage: float = setting(0.1, above=0, max=1)
        """Share of the identity matrix in the covariance matrices, which may be singular."""

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return both terms for ``output`` (2, B, D), computed by every rank for all images."""
        features, instances = zerocl_terms(output, shrinkage=self.config.shrinkage)
        return {"features": features, "instances": self.config.instance_weight * instances}


@in_full_precision
def zerocl_terms(output: Tensor, *, shrinkage: float) -> tuple[Tensor, Tensor]:
    """Return the sums of (1 - c)^2 over the D features, and over the N images.

    c is the correlation of both views after whitening: of a feature over images, or of an image
    over features.

    Args:
        output: (2, B, D).
        shrinkage: Share of the identity matrix in the covariance matrices.
    """
    rows = gather_cat_with_grad(output.transpose(0, 1)).transpose(0, 1)  # (2, N, D)
    terms = []
    for vectors in (rows.mT, rows):  # the features, then the images
        white = whiten(standardize(vectors), shrinkage)
        correlations = (white[0] * white[1]).mean(dim=-1)
        terms.append((1 - correlations).square().sum())
    return terms[0], terms[1]


def standardize(vectors: Tensor) -> Tensor:
    """Standardize vectors (..., n) to mean 0 and variance 1."""
    centered = vectors - vectors.mean(dim=-1, keepdim=True)
    return centered * (centered.square().mean(dim=-1, keepdim=True) + EPS).rsqrt()


def whiten(vectors: Tensor, shrinkage: float) -> Tensor:
    """Return the m centered vectors in (..., m, n), decorrelated from each other by ZCA.

    The identity has the share ``shrinkage`` in their (m, m) covariance matrix. The whitening matrix
    has no gradient.
    """
    fixed = vectors.detach()
    covariance = fixed @ fixed.mT / (vectors.shape[-1] - 1)
    identity = torch.eye(len(covariance[0]), dtype=fixed.dtype, device=fixed.device)
    return inverse_root(covariance.lerp(identity, shrinkage)) @ vectors
