"""SimSiam: predict the other view's projection, which has no gradient; no teacher, no negatives.

V: views of an image, two in the paper; B: images per rank, D: width of the projector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema.optimizer import GroupRule
from selftask.methods.base import Task
from selftask.methods.families.neighbor_targets import NeighborTargets
from selftask.models.heads import ProjectorPredictor, mlp
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("simsiam")
class SimSiam(NeighborTargets):
    """SimSiam (arXiv:2011.10566): predicts the projection of the other view, without a teacher.

    With more than two views it is FastSiam (Pototzky et al., GCPR 2022): the target of a view is
    the mean of the projections of the others. With ``queue_size`` it is NNSiam (NNCLR's paper,
    arXiv:2104.14548): projections are replaced by their nearest neighbors among earlier images.

    Loss: ``-cos(p1, z2)`` of the prediction p1 for one view and the projection z2 of the other,
    which has no gradient, and the same with the views exchanged, halved (eq. 2).

    Use it on small machines: no teacher, no queue, small batches.
    """

    paper = "Chen and He, Exploring Simple Siamese Representation Learning, CVPR 2021"
    loss_reduction = "samples"
    views = (2, None)
    per_view = True
    min_batch_size = 2  # BatchNorm in the head

    @dataclass(frozen=True, kw_only=True)
    class Config(NeighborTargets.Config):
        out_dim: int = setting(2048, min=1, tiny=16)
        """Width of the projector, D."""
        hidden_dim: int = setting(512, min=1, tiny=8)
        """Width of the predictor's hidden layer."""
        projector_layers: int = setting(3, min=2)
        """Number of layers of the projector; 2 for CIFAR-10."""
        projector_dim: int | None = setting(None, min=1, tiny=32)
        """Width of the projector's hidden layers; null: the width of the backbone."""
        fix_predictor_lr: bool = True
        """Whether the learning rate of the predictor stays constant after the warm-up."""

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build projector and predictor; the projector's last BatchNorm has no scale or shift."""
        config = self.config
        hidden = [config.projector_dim or embed_dim] * (config.projector_layers - 1)
        sizes = (embed_dim, *hidden, config.out_dim)
        return ProjectorPredictor(
            mlp(*sizes, bias=False, last_norm=True, last_affine=False),
            mlp(config.out_dim, config.hidden_dim, config.out_dim, bias=False),
        )

    def group_rules(self) -> list[GroupRule]:
        """Keep the predictor's learning rate constant after the warm-up if ``fix_predictor_lr``."""
        if not self.config.fix_predictor_lr:
            return []
        return [GroupRule(match="network.head.predictor", schedule="constant")]

    def on_forward(self, task: Task) -> None:
        """Set ``batch["targets"]`` (V, B, D): projections, or with a queue their neighbors."""
        batch = task.last_batch
        batch["targets"] = self.nearest(batch.output[:, :, 0], task)

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss of eq. 2 for ``output`` (V, B, 2, D); targets average the other views."""
        return similarity_loss(output[:, :, 1], batch["targets"])


@in_full_precision
def similarity_loss(prediction: Tensor, projection: Tensor) -> Tensor:
    """Return minus the cosine of each prediction and the mean projection of the other views.

    Args:
        prediction: (V, B, D).
        projection: (V, B, D), used without gradient. It is not normalized before the mean.

    Returns:
        The mean over views and images, from -1 to 1.
    """
    projection = projection.detach()
    others = projection.sum(dim=0) - projection  # the mean, up to a factor
    return -F.cosine_similarity(prediction, others, dim=2).mean()
