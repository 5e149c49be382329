"""CorInfoMax: views agree, and the running covariance of each has a large determinant.

B: images per rank, D: width of the projector.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import sum_with_equal_grad, sum_with_grad, world_size
from selftask.methods.base import Task
from selftask.methods.families.projected import Projected
from selftask.models.losses.coding_rate import log_determinant
from selftask.models.precision import in_full_precision, to_float32
from selftask.registry import register_method


@register_method("corinfomax")
class CorInfoMax(Projected):
    """CorInfoMax (arXiv:2209.07999): views agree; the determinants of their covariances are large.

    Loss: ``-(ln det(R1 + eps I) + ln det(R2 + eps I)) / D + alpha |z1 - z2|^2 / D`` of the unit
    vectors z1, z2 of two views, with D features, and their running covariances R1, R2 (eq. 12, with
    a mean of squares).

    Use it with small batches: covariances are averaged over steps.

    Differs from the authors' code:

    * Means and covariances are over the images of all ranks, and are saved and resumed.
    """

    paper = (
        "Ozsoy et al., Self-Supervised Learning with an Information Maximization Criterion, "
        "NeurIPS 2022"
    )
    columns = {
        "invariance": "Term of the loss: two views have the same embedding.",
        "determinant": "Term of the loss: minus ln det of the covariances; features vary.",
    }
    loss_reduction = "statistics"  # means and covariances
    views = 2
    per_view = True
    min_batch_size = 2

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(64, min=1, tiny=4)
        """Width of the head's output, D; below ``train.batch_size``."""
        hidden_dim: int = setting(2048, min=1, tiny=32)
        """Width of the projector's two hidden layers."""
        invariance_weight: float = setting(500.0, min=0)
        """Weight of the agreement of views, alpha; 250 on CIFAR-10."""
        forgetting: float = setting(0.01, min=0, below=1)
        """Weight of the previous means and covariances at each step."""
        epsilon: float = setting(1e-8, min=0)
        """Number added to the diagonal of the covariances."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            batch_size = config["train"]["batch_size"]
            if batch_size <= self.out_dim:
                yield (
                    f"out_dim: the covariance of {self.out_dim} features of {batch_size} images "
                    "(train.batch_size) has no inverse; give fewer features"
                )

    mean: Tensor
    """Running means of both views, (2, 1, D)."""
    covariance: Tensor
    """Running covariances of both views, (2, D, D)."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        dim = config.out_dim
        self.register_buffer("mean", torch.zeros(2, 1, dim))
        self.register_buffer("covariance", torch.eye(dim).repeat(2, 1, 1))

    def on_forward(self, task: Task) -> None:
        if task.train:
            self.pending.append(task.last_batch.output.detach())

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return both terms of eq. 12 for ``output`` (2, B, D)."""
        config, units = self.config, F.normalize(to_float32(output), dim=2)
        _, covariance = self.moved(units)
        return {
            "invariance": config.invariance_weight * F.mse_loss(units[0], units[1]),
            "determinant": determinant(covariance, epsilon=config.epsilon),
        }

    def moved(self, units: Tensor) -> tuple[Tensor, Tensor]:
        """Return the running statistics after a batch; the buffers are unchanged.

        Args:
            units: Unit vectors of both views, (2, B, D).

        Returns:
            Means (2, 1, D) and covariances (2, D, D).
        """
        state = self.mean, self.covariance
        return running_statistics(units, *state, forgetting=self.config.forgetting)

    @torch.no_grad()
    def on_update(self, task: Task) -> None:
        """Update means and covariances with the batches of this step, in their order."""
        super().on_update(task)
        for output in self.take_pending():
            mean, covariance = self.moved(F.normalize(to_float32(output), dim=2))
            self.mean.copy_(mean)
            self.covariance.copy_(covariance)


def determinant(covariance: Tensor, *, epsilon: float) -> Tensor:
    """Return minus the sum of ln det of both covariances, divided by D.

    Args:
        covariance: (2, D, D).
        epsilon: Added to the diagonal.
    """
    dim = covariance.shape[-1]
    identity = torch.eye(dim, dtype=covariance.dtype, device=covariance.device)
    return -log_determinant(covariance + epsilon * identity).sum() / dim


@in_full_precision
def running_statistics(
    units: Tensor, mean: Tensor, covariance: Tensor, *, forgetting: float
) -> tuple[Tensor, Tensor]:
    """Return moving averages of the means (2, 1, D) and covariances (2, D, D), equal on all ranks.

    Features are centered by the new running mean. Only the statistics of this batch have gradients.

    Args:
        units: (2, B, D).
        mean: Running means, (2, 1, D).
        covariance: Running covariances, (2, D, D).
        forgetting: Weight of the previous values.
    """
    num_images = units.shape[1] * world_size()
    batch_mean = sum_with_grad(units.sum(dim=1, keepdim=True)) / num_images
    mean = batch_mean.lerp(mean.to(units.dtype), forgetting)
    centered = units - mean
    products = sum_with_equal_grad(centered.mT @ centered) / num_images
    return mean, products.lerp(covariance.to(units.dtype), forgetting)
