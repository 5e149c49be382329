"""MMCR: the means of the views of an image fill all directions; their nuclear norm is large.

V: views, B: images per rank, W: ranks, N: images of all ranks, D: width of the projector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import all_gather_cat, rank, sum_with_equal_grad
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import Schedule
from selftask.methods.families.projected import Projected
from selftask.models.losses.polar import nuclear_norm, polar_factor
from selftask.models.precision import in_full_precision, to_float32
from selftask.models.teacher import Teacher
from selftask.optim.schedules import build_schedule
from selftask.registry import register_method


@register_method("mmcr")
class MMCR(Projected):
    """MMCR (arXiv:2303.03307): maximizes the nuclear norm of the mean embeddings of images.

    Means over views are long if views agree, and their matrix has a large nuclear norm if images
    fill all directions evenly.

    Loss: ``lambda mean_i |Z_i|_* - |C|_*`` with the nuclear norms of an image's views Z_i and of
    the means C of all images (eq. 3).

    Use it with few epochs and many views of each image.

    Differs from the authors' code:

    * The gradient flows to the images of all ranks; in the authors' code only to each rank's own,
      which scales it by 1 / W.
    """

    paper = (
        "Yerxa et al., Efficient Coding of Natural Images using Maximum Manifold Capacity "
        "Representations, NeurIPS 2023"
    )
    columns = {
        "global_norm": "Term of the loss: minus the nuclear norm of the means of images.",
        "local_norm": "Term of the loss: mean nuclear norm of the views of an image.",
    }
    loss_reduction = "statistics"  # the means of all images, and their nuclear norm
    views = (2, None)
    min_batch_size = 2
    head_options = {"bias": False}

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(512, min=1, tiny=12)
        """Width of the head's output, D."""
        hidden_dim: int = setting(8192, min=1, tiny=32)
        """Width of the projector's two hidden layers."""
        local_weight: float = setting(0.0, min=0)
        """Weight of the nuclear norm of the views of an image, lambda; 0 on ImageNet."""
        momentum: Schedule | None = setting(None, of="schedules", min=0, max=1)
        """Momentum of a teacher, whose means are averaged with the network's; null: no teacher.
        0.99 in the paper's variant with a teacher.
        """

    def setup(self, task: Task) -> None:
        super().setup(task)
        self.teacher = None
        if self.config.momentum is not None:
            self.teacher = Teacher(task.base_model)
            self.momentum_at = build_schedule(self.config.momentum, task.length)

    def on_forward(self, task: Task) -> None:
        """Compute ``batch["teacher"]`` (V, B, D), if there is a teacher."""
        if self.teacher is not None:
            task.last_batch["teacher"] = self.teacher(task.last_batch.input)  # (V, B, D)

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the weighted terms of eq. 3 for ``output`` (V, B, D).

        There is no ``local_norm`` if ``local_weight`` is 0.
        """
        terms = {"global_norm": -global_norm(output, batch.added.get("teacher"))}
        if self.config.local_weight:
            terms["local_norm"] = self.config.local_weight * local_norm(output)
        return terms

    def on_update(self, task: Task) -> None:
        super().on_update(task)
        if self.teacher is not None:
            self.teacher.update(task.base_model, momentum=self.momentum_at(task.where))


@in_full_precision
def global_norm(output: Tensor, teacher: Tensor | None = None) -> Tensor:
    """Return the nuclear norm of the (N, D) means of the views of images, equal on all ranks.

    The gradient with respect to the means of a rank is their rows of the polar factor.

    Args:
        output: (V, B, D), not necessarily normalized.
        teacher: (V, B, D); its means are averaged with those of ``output``.
    """
    means = F.normalize(output, dim=2).mean(dim=0)  # (B, D)
    if teacher is not None:
        means = (means + F.normalize(to_float32(teacher), dim=2).mean(dim=0)) / 2
    first = rank() * len(means)
    factor = polar_factor(all_gather_cat(means))[first : first + len(means)]
    return sum_with_equal_grad((factor * means).sum())


@in_full_precision
def local_norm(output: Tensor) -> Tensor:
    """Return the mean over images of the nuclear norm of an image's views (V, D)."""
    return nuclear_norm(F.normalize(output, dim=2).transpose(0, 1)).mean()
