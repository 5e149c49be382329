"""MEC: maximize the coding length of the features of two views, so that they agree and spread.

B: images per rank, N: images of all ranks, D: width of projector and predictor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import gather_cat_with_grad
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import ProjectorTeacher, Schedule
from selftask.models.heads import ProjectorPredictor, mlp
from selftask.models.precision import in_full_precision
from selftask.optim.schedules import build_schedule
from selftask.registry import register_method


@register_method("mec")
class MEC(ProjectorTeacher):
    """MEC (arXiv:2210.11464): maximizes the coding length that two views of the images share.

    Loss: ``-tr(C - C^2/2 + C^3/3 - C^4/4) / (lambda N)``, the series of ``ln det(I + C)``, with
    ``C = lambda P Z'`` of the predictions P and the teacher's projections Z of N images; lambda is
    given by ``distortion`` and ``expansion``.

    Published: ImageNet linear top-1 of ResNet-50 70.8 after 100 epochs (authors' README).

    Use it in place of ``simsiam`` or ``byol`` for short runs.

    Differs from the authors' code:

    * ``expansion`` reaches its end value after the warm-up; in the authors' code, one step earlier.
    """

    paper = "Liu et al., Self-Supervised Learning via Maximum Entropy Coding, NeurIPS 2022"
    loss_reduction = "gathered"  # the coding length is of the images of all ranks
    views = 2
    min_batch_size = 2

    @dataclass(frozen=True, kw_only=True)
    class Config(ProjectorTeacher.Config):
        out_dim: int = setting(2048, min=1, tiny=16)
        """Width of projector and predictor, D."""
        hidden_dim: int = setting(2048, min=1, tiny=32)
        """Width of the projector's hidden layers."""
        predictor_dim: int = setting(512, min=1, tiny=8)
        """Width of the predictor's hidden layer."""
        distortion: float = setting(64.0, above=0)
        """Distortion of the code, epsilon; lambda is ``out_dim`` / (batch size * epsilon)."""
        expansion: Schedule = setting(
            {"name": "constant", "start": 1.0, "warmup": "10 epochs", "warmup_start": 8.0},
            of="schedules",
            above=0,
        )
        """Factor of 1 / lambda, see ``distortion``; larger values at first keep the series from
        diverging.
        """
        order: int = setting(4, min=1)
        """Order of the Taylor series of the logarithm."""

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build projector and predictor."""
        config = self.config
        hidden, dim = config.hidden_dim, config.out_dim
        projector = mlp(
            embed_dim, hidden, hidden, dim, bias=False, last_norm=True, last_affine=False
        )
        return ProjectorPredictor(projector, mlp(dim, config.predictor_dim, dim, bias=False))

    def setup(self, task: Task) -> None:
        super().setup(task)
        self.expansion_at = build_schedule(self.config.expansion, task.length)

    def on_forward(self, task: Task) -> None:
        task.last_batch["projection"] = self.teacher(task.last_batch.input)  # (2, B, D)
        task.last_batch["expansion"] = self.expansion_at(task.where)

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return minus the coding length per image for ``output`` (2, B, 2, D)."""
        return mec_loss(
            output[:, :, 1],
            batch["projection"].flip(0),
            distortion=self.config.distortion,
            expansion=batch["expansion"],
            order=self.config.order,
        )


@in_full_precision
def mec_loss(
    prediction: Tensor, target: Tensor, *, distortion: float, expansion: float, order: int
) -> Tensor:
    """Return minus the trace of log(I + C), a Taylor series, times 1 / (lambda * N).

    Eq. 5 and 6, with C = target @ prediction.T * lambda for rows of unit length; a mean over views.
    Every rank computes the value for all N images.

    Args:
        prediction: (2, B, D), not necessarily normalized.
        target: The teacher's projections of the other views, (2, B, D), not necessarily normalized.
        distortion: epsilon.
        expansion: Factor of 1 / lambda.
        order: Order of the Taylor series.
    """
    traces = []
    for student, teacher in zip(prediction, target, strict=True):
        rows = gather_cat_with_grad(F.normalize(student, dim=1))  # (N, D)
        others = gather_cat_with_grad(F.normalize(teacher, dim=1))
        scale = expansion * len(rows) * distortion / rows.shape[1]  # 1 / lambda
        traces.append(scale / len(rows) * _log_trace(others, rows, scale, order))
    return -torch.stack(traces).mean()


def _log_trace(others: Tensor, rows: Tensor, scale: float, order: int) -> Tensor:
    """Return the trace of the Taylor series of log(I + others @ rows.T / scale), up to ``order``.

    The trace with rows.T @ others, (D, D), is the same; the smaller product is used. The diagonal
    is summed, since the backward pass of ``torch.trace`` waits for the GPU.
    """
    small = rows.shape[0] <= rows.shape[1]
    matrix = (others @ rows.T if small else rows.T @ others) / scale
    power, total = matrix, matrix.diagonal().sum()
    for k in range(2, order + 1):
        power = power @ matrix
        total = total + (-1) ** (k + 1) * power.diagonal().sum() / k
    return total
