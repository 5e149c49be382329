"""TiCo: views agree, and features avoid the most frequent directions of past features.

B: images per rank, D: width of the projector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import all_reduce_mean
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import EMATeacher
from selftask.models.heads import mlp
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("tico")
class TiCo(EMATeacher):
    """TiCo (arXiv:2206.10698): matches an EMA teacher's output; features spread in all directions.

    Loss: ``1 - cos(z, t) + rho z' C z`` of the unit vectors z of the network and t of the teacher,
    with the running second moments C of z (eq. 6).

    Use it for small batches: the running covariance replaces a queue of other images.

    Differs from the authors' code:

    * The covariance is over the images of all ranks, and is saved and resumed. The authors' code
      was not available; results are compared with lightly's code, which does not save the
      covariance.
    """

    paper = (
        "Zhu et al., TiCo: Transformation Invariance and Covariance Contrast for Self-Supervised "
        "Visual Representation Learning, 2022"
    )
    columns = {
        "invariance": "Term of the loss: two views have the same embedding.",
        "contrast": "Term of the loss: squared length along the directions of other images.",
    }
    loss_reduction = "samples"  # the covariance has no gradient
    views = 2
    per_view = True
    min_batch_size = 2  # BatchNorm in the head

    @dataclass(frozen=True, kw_only=True)
    class Config(EMATeacher.Config):
        out_dim: int = setting(256, min=1, tiny=16)
        """Width of the head's output, D."""
        hidden_dim: int = setting(4096, min=1, tiny=32)
        """Width of the projector's hidden layer."""
        covariance_momentum: float = setting(0.9, min=0, max=1)
        """Weight of the previous covariance at each step, beta."""
        covariance_weight: float = setting(8.0, min=0)
        """Weight of the covariance term, rho."""

    covariance: Tensor
    """Moving average of the (uncentered) covariance of the student's unit vectors, (D, D)."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.register_buffer("covariance", torch.zeros(config.out_dim, config.out_dim))

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build the projector of two layers."""
        return mlp(embed_dim, self.config.hidden_dim, self.config.out_dim)

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Pass the first view to the student; the teacher gets the second one."""
        batch.input = batch.all_views[:1]

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Set ``batch["teacher"]`` (B, D) and ``batch["covariance"]`` (D, D).

        They are the teacher's output for the second view, and the covariance after this batch.
        """
        batch = task.last_batch
        (batch["teacher"],) = self.teacher(batch.all_views[1:])  # (B, D)
        products = all_reduce_mean(second_moments(batch.output[0]))
        batch["covariance"] = self._moved(products)
        if task.train:
            self.pending.append(products)

    def _moved(self, products: Tensor) -> Tensor:
        return self.covariance.lerp(
            products.to(self.covariance.dtype), 1 - self.config.covariance_momentum
        )

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return both terms of eq. 6 for ``output`` (1, B, D)."""
        invariance, contrast = tico_terms(output[0], batch["teacher"], batch["covariance"])
        return {"invariance": invariance, "contrast": self.config.covariance_weight * contrast}

    def on_update(self, task: Any) -> None:
        super().on_update(task)
        for products in self.take_pending():
            self.covariance.copy_(self._moved(products))


@in_full_precision
def second_moments(rows: Tensor) -> Tensor:
    """Return the mean of z z' over ``rows`` (B, D), with z of unit length."""
    units = F.normalize(rows, dim=1)
    return units.T @ units / len(units)


@in_full_precision
def tico_terms(student: Tensor, teacher: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means over images of 1 - cos(z, t) and of z' C z, with z and t of unit length.

    Args:
        student: z, (B, D), not necessarily normalized.
        teacher: t, (B, D), not necessarily normalized.
        covariance: C, (D, D).
    """
    first, second = F.normalize(student, dim=1), F.normalize(teacher, dim=1)
    invariance = 1 - (first * second).sum(dim=1).mean()
    form = ((first @ covariance.to(first.dtype)) * first).sum(dim=1)
    return invariance, form.mean()
