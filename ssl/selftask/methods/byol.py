"""BYOL: predict a slow teacher's projection of the other view; no negatives.

B: images per rank, D: width of projector and predictor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import ProjectorTeacher
from selftask.methods.families.neighbor_targets import NeighborTargets
from selftask.models.heads import ProjectorPredictor, mlp
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("byol")
class BYOL(ProjectorTeacher, NeighborTargets):
    """BYOL (arXiv:2006.07733): predicts an EMA teacher's output for another view.

    With ``queue_size`` it is NNBYOL (NNCLR's paper, arXiv:2104.14548): the target is the nearest
    neighbor of the teacher's output among its outputs for earlier images.

    Loss: ``2 - 2 cos(p1, t2)`` of the prediction p1 for one view and the teacher's output t2 for
    the other, and the same with the views exchanged (eq. 2).

    Use it with batches too small for negatives; a reliable first choice for convolutional networks.

    Differs from the authors' code:

    * Warm-up takes 3,120 steps, not 3,127, since an epoch omits the last partial batch. Initial
      weights are torch's, not haiku's.
    * The teacher starts as a copy of the network; in the authors' code it starts from its own
      random weights, which makes no significant difference according to the authors. A copy keeps
      ``init.backbone`` meaningful.
    """

    paper = (
        "Grill et al., Bootstrap Your Own Latent: A New Approach to Self-Supervised Learning, "
        "NeurIPS 2020"
    )
    loss_reduction = "samples"
    views = 2
    min_batch_size = 2  # BatchNorm in the head

    @dataclass(frozen=True, kw_only=True)
    class Config(ProjectorTeacher.Config, NeighborTargets.Config):
        hidden_dim: int = setting(4096, min=1, tiny=32)
        """Width of the hidden layers of projector and predictor."""

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build projector and predictor, without BatchNorm after the last layer of either."""
        dim, hidden_dim = self.config.out_dim, self.config.hidden_dim
        return ProjectorPredictor(
            mlp(embed_dim, hidden_dim, dim, last_bias=False),
            mlp(dim, hidden_dim, dim, last_bias=False),
        )

    def on_forward(self, task: Task) -> None:
        batch = task.last_batch
        batch["targets"] = self.nearest(self.teacher(batch.input), task)  # (2, B, D)

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss of eq. 2 for ``output`` (2, B, 2, D), summed over both directions."""
        _, prediction = output.unbind(2)  # (2, B, D)
        return regression_loss(prediction, batch["targets"].flip(0))


@in_full_precision
def regression_loss(prediction: Tensor, projection: Tensor) -> Tensor:
    """Return 2 - 2 cos, the squared distance on the unit sphere: sum over views, mean over images.

    Args:
        prediction: (2, B, D), not necessarily normalized.
        projection: The target of each prediction, (2, B, D), not necessarily normalized.

    Returns:
        A scalar from 0 (same directions) to 8 (opposite directions).
    """
    cosine = F.cosine_similarity(prediction, projection, dim=2)  # (2, B)
    return (2 - 2 * cosine).sum(dim=0).mean()
