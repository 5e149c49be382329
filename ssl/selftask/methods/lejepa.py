"""LeJEPA: views predict their mean, and embeddings are distributed like an isotropic Gaussian.

V: views, the first two of which are global; B: images per rank; D: width of the embeddings; M:
slices, random directions; T: points of an integral.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import sum_with_grad, world_size
from selftask.methods.base import Task
from selftask.methods.families.projected import Projected
from selftask.models.precision import in_full_precision, to_float32
from selftask.random.keyed import batch_normal
from selftask.registry import register_method

NUM_GLOBAL = 2  # views whose mean is the center


@register_method("lejepa")
class LeJEPA(Projected):
    """LeJEPA (arXiv:2511.08544): views predict their mean; embeddings are spread like a Gaussian.

    Loss: ``(1 - lambda) mean (c - z_v)^2 + lambda SIGReg`` of the embeddings z_v of views v and
    their center c, the mean over the global views. SIGReg measures the distance of random
    projections from a Gaussian by their characteristic functions.

    Published: Imagenette linear top-1 of ViT-S/8 90.7 after 800 epochs (authors' MINIMAL.md).

    Use it with any backbone; it has no teacher and a single weight to tune.

    Differs from the authors' code:

    * All ranks use the same slices; in the short example of the repository each GPU draws its own,
      so that its loss depends on the number of GPUs.
    """

    paper = (
        "Balestriero and LeCun, LeJEPA: Provable and Scalable Self-Supervised Learning Without the "
        "Heuristics, 2025"
    )
    columns = {
        "prediction": "Term of the loss: views have the embedding of their center.",
        "sigreg": "Term of the loss: embeddings are distributed like an isotropic Gaussian.",
    }
    loss_reduction = "statistics"  # characteristic functions of the global batch
    views = (2, None)
    min_batch_size = 2

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(64, min=1, tiny=8)
        """Width of the embeddings, D."""
        hidden_dim: int = setting(2048, min=1, tiny=32)
        """Width of the projector's two hidden layers."""
        sigreg_weight: float = setting(0.05, min=0, max=1)
        """Weight of SIGReg, lambda; the prediction has the weight 1 - lambda."""
        num_slices: int = setting(1024, min=1, tiny=8)
        """Number of random directions on which the distribution is tested, M; new in each step."""
        num_points: int = setting(17, min=2)
        """Number of points of the integral from 0 to its limit, T."""
        integral_limit: float = setting(3.0, above=0)
        """Limit of the integral, which is taken from minus this number to this number."""
        center: Literal["global", "all"] = "global"
        """Views whose mean is predicted. global: the first two, as in the paper; all: all views."""

    def on_forward(self, task: Task) -> None:
        """Draw ``batch["slices"]``, (D, M) unit vectors, the same on all ranks."""
        batch, (dim, num) = task.last_batch, (self.config.out_dim, self.config.num_slices)
        draws = batch_normal(task.config.train.seed, batch.number, dim * num, task.device)
        batch["slices"] = F.normalize(draws.view(dim, num), dim=0)

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return both weighted terms for ``output`` (V, B, D)."""
        config, embeddings = self.config, to_float32(output)
        centered = embeddings if config.center == "all" else embeddings[:NUM_GLOBAL]
        distance = F.mse_loss(embeddings, centered.mean(dim=0).expand_as(embeddings))
        distribution = sigreg(
            embeddings, batch["slices"], num_points=config.num_points, limit=config.integral_limit
        )
        return {
            "prediction": (1 - config.sigreg_weight) * distance,
            "sigreg": config.sigreg_weight * distribution,
        }


@in_full_precision
def sigreg(embeddings: Tensor, slices: Tensor, *, num_points: int, limit: float) -> Tensor:
    """Return the mean of Epps and Pulley's statistic over slices and views.

    The statistic compares the distribution of N numbers with the standard normal one. With the
    characteristic functions c of the numbers and g of the normal distribution, it is N times the
    integral of |c(t) - g(t)|^2 g(t).

    Args:
        embeddings: (V, B, D) of this rank; N is the number of images of all ranks.
        slices: (D, M), unit vectors.
        num_points: Number of points of the trapezoid rule from 0 to ``limit``.
        limit: Limit of the integral in both directions; the integrand is even.
    """
    t = torch.linspace(0, limit, num_points, dtype=embeddings.dtype, device=embeddings.device)
    normal = torch.exp(-t.square() / 2)  # (T,)
    angles = (embeddings @ slices.to(embeddings.dtype))[..., None] * t  # (V, B, M, T)
    num_images = embeddings.shape[1] * world_size()
    sums = torch.stack([angles.cos().sum(dim=1), angles.sin().sum(dim=1)])  # (2, V, M, T)
    real, imaginary = sum_with_grad(sums) / num_images
    error = (real - normal).square() + imaginary.square()
    return 2 * num_images * torch.trapezoid(error * normal, t).mean()
