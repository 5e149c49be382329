"""VISReg: views predict their center; embeddings have the scale and the shape of a Gaussian.

V: views, the first two of which are global; B: images per rank, W: ranks, N: images of all ranks,
D: width of the embeddings; M: slices, random directions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import gather_cat_with_grad, rank, world_size
from selftask.methods.base import Task
from selftask.methods.families.projected import Projected
from selftask.models.precision import in_full_precision, to_float32
from selftask.random.keyed import batch_normal
from selftask.registry import register_method

NUM_GLOBAL = 2  # views whose mean is the center
EPS = 1e-4  # added to standard deviations


@register_method("visreg")
class VISReg(Projected):
    """VISReg (arXiv:2606.02572): views predict their center; embeddings are spread like a Gaussian.

    Loss: ``(1 - lambda) mean (c - z_v)^2 + lambda (scale + shape + center)`` of the embeddings z_v
    of views v and the mean c of the global views. The terms scale, shape and center are distances
    of standard deviations, sorted projections and means from those of a Gaussian.

    Use it like ``lejepa``, with any backbone and without a teacher.

    Differs from the authors' code:

    * All ranks use the same slices, divided among them. Results are compared with lightly's code,
      not the authors'.
    """

    paper = (
        "Wu et al., VISReg: Variance-Invariance-Sketching Regularization for JEPA Training, 2026"
    )
    columns = {
        "prediction": "Term of the loss: views have the embedding of their center.",
        "scale": "Term of the loss: components have the standard deviation 1.",
        "shape": "Term of the loss: projections are distributed like a Gaussian.",
        "center": "Term of the loss: components have the mean 0.",
    }
    loss_reduction = "gathered"  # images are sorted with those of all ranks
    views = (2, None)
    min_batch_size = 2

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(64, min=1, tiny=8)
        """Width of the embeddings, D."""
        hidden_dim: int = setting(2048, min=1, tiny=32)
        """Width of the projector's two hidden layers."""
        regularization_weight: float = setting(0.9, min=0, max=1)
        """Weight of scale, shape and center, lambda; the prediction has the weight 1 - lambda."""
        num_slices: int = setting(4096, min=1, tiny=8)
        """Number of random directions on which the shape is compared, M; drawn in each step."""

    def on_forward(self, task: Task) -> None:
        """Draw ``batch["slices"]``, (D, M) unit vectors, the same on all ranks."""
        batch, (dim, num) = task.last_batch, (self.config.out_dim, self.config.num_slices)
        draws = batch_normal(task.config.train.seed, batch.number, dim * num, task.device)
        batch["slices"] = F.normalize(draws.view(dim, num), dim=0)

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the weighted terms for ``output`` (V, B, D)."""
        weight, embeddings = self.config.regularization_weight, to_float32(output)
        center = embeddings[:NUM_GLOBAL].mean(dim=0)
        terms = gaussian_terms(embeddings, batch["slices"])
        return {
            "prediction": (1 - weight) * F.mse_loss(embeddings, center.expand_as(embeddings)),
            **{name: weight * term for name, term in terms.items()},
        }


@in_full_precision
def gaussian_terms(embeddings: Tensor, slices: Tensor) -> dict[str, Tensor]:
    """Return the distances of the embeddings from a normal distribution, averaged over views.

    ``scale`` is the squared distance of standard deviations from 1, and ``center`` the squared
    distance of means from 0. ``shape`` is the squared distance of sorted projections from the
    normal quantiles of i / (N + 1), an estimate of the squared Wasserstein distance. For it
    embeddings are standardized by their mean and by their standard deviation, which is detached.
    Each rank computes ``shape`` for a part of the slices; the mean over ranks is the term.

    Args:
        embeddings: (V, B, D) of this rank.
        slices: (D, M), unit vectors.
    """
    rows = gather_cat_with_grad(embeddings.transpose(0, 1)).transpose(0, 1)  # (V, N, D)
    mean, deviation = rows.mean(dim=1), rows.std(dim=1, correction=0)  # (V, D)
    standardized = (rows - mean[:, None]) / (deviation.detach()[:, None] + EPS)
    mine = slices[:, rank() :: world_size()].to(rows.dtype)
    projections = (standardized @ mine).sort(dim=1).values  # (V, N, M / W)
    ranks = torch.arange(1, rows.shape[1] + 1, dtype=rows.dtype, device=rows.device)
    quantiles = torch.special.ndtri(ranks / (rows.shape[1] + 1))
    distance = (projections - quantiles[:, None]).square().mean(dim=1).sum()
    return {
        "scale": (1 - deviation).square().mean(),
        "shape": distance * world_size() / (len(rows) * slices.shape[1]),
        "center": mean.square().mean(),
    }
