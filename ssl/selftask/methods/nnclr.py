"""NNCLR: the positive of an image is the nearest neighbor of its other view among older images.

B: images per rank, D: width of the head, K: length of the queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.base import Task
from selftask.methods.families.neighbor_targets import NeighborTargets
from selftask.models.heads import ProjectorPredictor, mlp
from selftask.models.losses.contrast import gathered_cross_entropy
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("nnclr")
class NNCLR(NeighborTargets):
    """NNCLR (arXiv:2104.14548): contrasts a view with a neighbor of the other view in a queue.

    Loss: ``CE(nn(z1).p2/tau)`` of the neighbor nn(z1) of one view's projection and the predictions
    p2 for the other views of the batch, averaged over both directions (eq. 3).

    Use it in place of ``simclr`` if augmentations vary too little.

    Differs from the authors' code:

    * The authors' code was not available; results are compared with solo-learn's code.
    """

    paper = (
        "Dwibedi et al., With a Little Help from My Friends: Nearest-Neighbor Contrastive Learning "
        "of Visual Representations, ICCV 2021"
    )
    loss_reduction = "gathered"  # negatives are the predictions of all ranks
    views = 2
    per_view = True
    min_batch_size = 2

    @dataclass(frozen=True, kw_only=True)
    class Config(NeighborTargets.Config):
        hidden_dim: int = setting(2048, min=1, tiny=32)
        """Width of the projector's two hidden layers."""
        predictor_dim: int = setting(4096, min=1, tiny=32)
        """Width of the predictor's hidden layer."""
        queue_size: int = setting(98_304, min=1, tiny=lambda batch: 2 * batch)
        """Length of the queue in which neighbors are searched, in images; K."""
        temperature: float = setting(0.1, above=0)
        """Temperature of the similarities, tau."""

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build projector and predictor; the projector's last layer has BatchNorm, too."""
        config = self.config
        hidden, out_dim = config.hidden_dim, config.out_dim
        return ProjectorPredictor(
            mlp(embed_dim, hidden, hidden, out_dim, last_norm=True),
            mlp(out_dim, config.predictor_dim, out_dim),
        )

    def on_forward(self, task: Task) -> None:
        """Set ``batch["neighbors"]`` (2, B, D), the projections' nearest entries of the queue."""
        batch = task.last_batch
        batch["neighbors"] = self.nearest(batch.output[:, :, 0], task)

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss of eq. 3 for ``output`` (2, B, 2, D), averaged over both directions."""
        prediction = output[:, :, 1]
        return neighbor_loss(prediction, batch["neighbors"], temperature=self.config.temperature)

    @property
    def chance_loss(self) -> float:
        """Loss of equal similarities: ln(batch)."""
        return math.log(self.batch_size)


@in_full_precision
def neighbor_loss(prediction: Tensor, neighbors: Tensor, *, temperature: float) -> Tensor:
    """Return the cross-entropy of matching each neighbor to the other view's prediction (eq. 3).

    The candidates are the predictions of that view on all ranks.

    Args:
        prediction: (2, B, D), not necessarily normalized.
        neighbors: (2, B, D), unit vectors: the nearest neighbor of each view's projection.
        temperature: tau.
    """
    predictions = F.normalize(prediction, dim=2).flip(0)
    losses = [
        gathered_cross_entropy(neighbor, other, scale=1 / temperature)
        for neighbor, other in zip(neighbors, predictions, strict=True)
    ]
    return torch.stack(losses).mean()
