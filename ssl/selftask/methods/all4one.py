"""All4One: contrast with a neighbor and a centroid of neighbors; decorrelate the features.

B: images per rank, E: width of the backbone, D: width of projector and predictors, K: length of the
queue, N: neighbors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema.optimizer import GroupRule
from selftask.distributed.collectives import sum_with_grad
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import ProjectorTeacher, Schedule, teacher_momentum
from selftask.methods.nnclr import neighbor_loss
from selftask.models.feature_queue import FeatureQueue
from selftask.models.heads import ProjectorPredictor, mlp
from selftask.models.precision import in_full_precision, to_float32
from selftask.registry import register_method

EPS = 1e-12  # added under square roots, whose gradient at 0 is infinite


@register_method("all4one")
class All4One(ProjectorTeacher):
    """All4One (arXiv:2303.09417): contrasts a view with a neighbor and a centroid of neighbors.

    Loss: ``-log softmax(nn.p/tau)`` of a neighbor nn and a prediction p, the same for centroids,
    and the distance of the cosines between feature dimensions from the identity matrix.

    Published: CIFAR-10 top-1 of ResNet-18 93.24, CIFAR-100 72.17, ImageNet-100 81.93 (README
    of solo-learn, which contains the authors' code).

    Use it if accuracy matters more than time: a step computes three terms and runs a transformer.

    Differs from the authors' code:

    * The transformer's position embeddings number the neighbors; in the authors' code, which
      exchanges the axes, they number the feature dimensions.
    * The transformer has no dropout: its draws would differ between calls of the loss.
    * The learning rate of the transformer is constant after the warm-up; in the authors' code, and
      in the CIFAR-10 recipe, it follows the schedule of the others.
    """

    paper = (
        "Estepa et al., All4One: Symbiotic Neighbour Contrastive Learning via Self-Attention and "
        "Redundancy Reduction, ICCV 2023"
    )
    columns = {
        "neighbor": "Term of the loss: a view recognizes the neighbor of the other view.",
        "centroid": "Term of the loss: a view recognizes the centroid of neighbors of the other.",
        "feature": "Term of the loss: dimensions equal those of the teacher, and no others.",
    }
    loss_reduction = "gathered"  # negatives are the predictions of all ranks
    views = 2
    min_batch_size = 2

    @dataclass(frozen=True, kw_only=True)
    class Config(ProjectorTeacher.Config):
        momentum: Schedule = teacher_momentum({"name": "cosine", "start": 0.99, "end": 1.0})
        """Momentum of the teacher."""
        out_dim: int = setting(256, min=2, tiny=16)
        """Width of projector and predictors, D."""
        hidden_dim: int = setting(2048, min=1, tiny=32)
        """Width of the projector's two hidden layers."""
        predictor_dim: int = setting(4096, min=1, tiny=32)
        """Width of the hidden layers of both predictors."""
        num_layers: int = setting(3, min=1, tiny=1)
        """Number of layers of the transformer that mixes neighbors."""
        num_heads: int = setting(8, min=1, tiny=2)
        """Number of attention heads of the transformer."""
        queue_size: int = setting(98_304, min=1, tiny=lambda batch: 2 * batch)
        """Length of the queue in which neighbors are searched, in images; K."""
        num_neighbors: int = setting(5, min=2)
        """Number of neighbors of a centroid, N."""
        temperature: float = setting(0.2, above=0)
        """Temperature of the similarities to neighbors."""
        centroid_temperature: float = setting(0.1, above=0)
        """Temperature of the similarities to centroids."""
        feature_weight: float = setting(5.0, min=0)
        """Weight of the feature term; the other two terms have a weight of 0.5 each."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if self.out_dim % 2 or self.out_dim % self.num_heads:
                yield (
                    f"out_dim: {self.out_dim} must be even, for the positions, and divisible by "
                    f"num_heads={self.num_heads}"
                )
            if self.num_neighbors > self.queue_size:
                yield (
                    f"num_neighbors: {self.num_neighbors} is more than the queue_size of "
                    f"{self.queue_size}"
                )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.queue = FeatureQueue(config.queue_size, config.out_dim)
        self.mixer = NeighborMixer(
            config.out_dim, config.num_neighbors, config.num_layers, config.num_heads
        )

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build NNCLR's projector, and two predictors: for neighbors and for centroids."""
        config = self.config
        hidden, dim = config.hidden_dim, config.out_dim
        return ProjectorPredictors(
            mlp(embed_dim, hidden, hidden, dim, last_norm=True),
            mlp(dim, config.predictor_dim, dim),
            mlp(dim, config.predictor_dim, dim),
        )

    def group_rules(self) -> list[GroupRule]:
        """Keep the learning rate of the transformer constant after the warm-up."""
        return [*super().group_rules(), GroupRule(match="loss.mixer", schedule="constant")]

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Find the neighbors of the teacher's outputs, and collect those outputs for the queue.

        Sets ``batch["teacher"]`` (2, B, D) and ``batch["neighbors"]`` (2, B, N, D). Only the
        outputs for the first view are enqueued, after the step.
        """
        batch = task.last_batch
        teacher = F.normalize(to_float32(self.teacher(batch.input)), dim=2)  # (2, B, D)
        batch["teacher"] = teacher
        batch["neighbors"] = self.queue.nearest_few(teacher, self.config.num_neighbors)
        if task.train:
            self.pending.append(teacher[0])

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the three weighted terms of the loss for ``output`` (2, B, 3, D)."""
        config, neighbors = self.config, batch["neighbors"]  # (2, B, N, D)
        _, prediction, query = output.unbind(2)
        nearest = neighbors[:, :, 0]
        contrast = neighbor_loss(prediction, nearest, temperature=config.temperature)
        centroid = centroid_loss(
            query, neighbors, self.mixer, temperature=config.centroid_temperature
        )
        feature = feature_loss(prediction, batch["teacher"].flip(0))
        return {
            "neighbor": 0.5 * contrast,
            "centroid": 0.5 * centroid,
            "feature": config.feature_weight * feature,
        }

    def on_update(self, task: Task) -> None:
        super().on_update(task)
        for rows in self.take_pending():
            self.queue.update(rows)


class ProjectorPredictors(ProjectorPredictor):
    """A projector and two predictors: features (N, E) -> (N, 3, D)."""

    def __init__(self, projector: nn.Module, predictor: nn.Module, second: nn.Module) -> None:
        super().__init__(projector, predictor)
        self.centroid_predictor = second

    def forward(self, features: Tensor) -> Tensor:
        projection = self.projector(features)  # (N, D)
        predictions = [self.predictor(projection), self.centroid_predictor(projection)]
        return torch.stack([projection, *predictions], dim=1)


class NeighborMixer(nn.Module):
    """Transformer whose first output is the centroid of a sequence: (B, N, D) -> (B, D)."""

    positions: Tensor  # (N, D)

    def __init__(self, dim: int, length: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(dim, num_heads, 2 * dim, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.register_buffer("positions", sine_positions(length, dim), persistent=False)

    def forward(self, sequence: Tensor) -> Tensor:
        mixed: Tensor = self.encoder(sequence + self.positions.to(sequence.dtype))
        return mixed[:, 0]


def sine_positions(length: int, dim: int) -> Tensor:
    """Return sine-cosine position embeddings (length, dim) (arXiv:1706.03762, section 3.5)."""
    rates = 10_000 ** (-torch.arange(0, dim, 2) / dim)
    angles = torch.arange(length)[:, None] * rates  # (length, dim / 2)
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)


@in_full_precision
def centroid_loss(
    query: Tensor, neighbors: Tensor, mixer: nn.Module, *, temperature: float
) -> Tensor:
    """Return NNCLR's loss between centroids of neighbors and centroids that include a view.

    The latter are computed from the view followed by all of its neighbors but the last.

    Args:
        query: Predictions of two views, (2, B, D).
        neighbors: Unit vectors (2, B, N, D), nearest first.
        mixer: Sequences (B, N, D) -> centroids (B, D).
        temperature: tau.
    """
    with_view = torch.cat([query[:, :, None], neighbors[:, :, :-1]], dim=2)
    goals = torch.stack([F.normalize(mixer(sequence), dim=1) for sequence in neighbors])
    predictions = torch.stack([mixer(sequence) for sequence in with_view])
    return neighbor_loss(predictions, goals, temperature=temperature)


@in_full_precision
def feature_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Return how much the cosines between feature dimensions differ from the identity matrix.

    The result is half the root mean square difference on the diagonal plus half of that off the
    diagonal. The cosines are over the batch of all ranks.

    Args:
        prediction: Predictions for two views, (2, B, D).
        target: The teacher's outputs for the other views, (2, B, D).
    """
    products = sum_with_grad(target.mT @ prediction)  # (2, D, D)
    cosines = products * _scales(target)[:, :, None] * _scales(prediction)[:, None]
    diagonal = cosines.diagonal(dim1=1, dim2=2)  # (2, D)
    gaps = (diagonal - 1).square().mean()
    others = cosines.square().sum() - diagonal.square().sum()
    rest = others.clamp(min=0) / (cosines.numel() - diagonal.numel())
    return 0.5 * (gaps + EPS).sqrt() + 0.5 * (rest + EPS).sqrt()


def _scales(features: Tensor) -> Tensor:
    """Return 1 / the norm of each dimension over the batch of all ranks, (2, D)."""
    return sum_with_grad(features.square().sum(dim=1)).clamp(min=EPS).rsqrt()
