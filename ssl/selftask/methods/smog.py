"""SMoG: contrast images with groups, which move with the network's own features.

B: images per rank, D: width of projector and predictor, K: groups, L: length of the queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import sum_with_grad
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import ProjectorTeacher, Schedule, teacher_momentum
from selftask.models.clustering import cluster_sums, spherical_kmeans
from selftask.models.feature_queue import FeatureQueue
from selftask.models.heads import ProjectorPredictor, mlp
from selftask.models.precision import in_full_precision, to_float32
from selftask.random.splitmix import hash_words
from selftask.registry import register_method

_GROUPS = 0x736D6F67  # "smog": separates these draws from others of the same seed


@register_method("smog")
class SMoG(ProjectorTeacher):
    """SMoG (arXiv:2207.06167): predicts the group of another view; groups move with each batch.

    Loss: ``-log softmax(cos(p1, g) / tau)[group of t2]`` of the prediction p1 for one view, groups
    g, and the teacher's output t2 for the other view, averaged over both directions.

    Published: ImageNet linear top-1 of ResNet-50 76.4 after 400 epochs with multi-crop (paper).

    Use it in place of ``swav`` if batches are small: groups need no balanced assignments.

    Differs from lightly's code; the authors' code is not public:

    * Both views are predicted in each step; in lightly's code they alternate.
    * Groups are recomputed between epochs; in lightly's code every 300 steps, an epoch of
      ImageNet for batches of 4096.
    * Projections are normalized before they move groups, so that their length does not matter.
    """

    paper = (
        "Pang et al., Unsupervised Visual Representation Learning by Synchronous Momentum "
        "Grouping, ECCV 2022"
    )
    loss_reduction = "statistics"  # means of the groups
    views = 2
    min_batch_size = 2  # BatchNorm in the head

    @dataclass(frozen=True, kw_only=True)
    class Config(ProjectorTeacher.Config):
        momentum: Schedule = teacher_momentum({"name": "cosine", "start": 0.996, "end": 1.0})
        """Momentum of the teacher."""
        out_dim: int = setting(128, min=1, tiny=16)
        """Width of the output of projector and predictor, D."""
        hidden_dim: int = setting(2048, min=1, tiny=32)
        """Width of the hidden layers of projector and predictor."""
        num_groups: int = setting(3000, min=2, tiny=6)
        """Number of groups, K."""
        group_momentum: float = setting(0.99, min=0, max=1)
        """Weight of the old groups at each step, beta."""
        temperature: float = setting(0.1, above=0)
        """Temperature of the softmax over groups."""
        cluster_every: int = setting(1, min=1)
        """Number of epochs after which the groups are recomputed by k-means of the queue, if it is
        full.
        """
        queue_size: int = setting(30_000, min=1, tiny=lambda batch: 2 * batch)
        """Length of the queue of the teacher's outputs, in images; L."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if self.queue_size < self.num_groups:
                yield (
                    f"queue_size: {self.queue_size} images cannot make num_groups="
                    f"{self.num_groups} groups; give several images a group"
                )

    groups: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        groups = F.normalize(torch.randn(config.num_groups, config.out_dim), dim=1)
        self.register_buffer("groups", groups)  # (K, D): never trained
        self.queue = FeatureQueue(config.queue_size, config.out_dim)

    def build_head(self, embed_dim: int) -> nn.Module:
        dim, hidden = self.config.out_dim, self.config.hidden_dim
        return ProjectorPredictor(mlp(embed_dim, hidden, dim), mlp(dim, hidden, dim))

    def on_phase_start(self, task: Task) -> None:
        """Set the groups by k-means of the queue, before every ``cluster_every``-th epoch.

        This is skipped if the run was resumed within the epoch, and until the queue is full of
        images, since its first rows are random. The result depends on queue, seed and epoch only,
        so it is the same on every rank.
        """
        clock, epoch = task.clock, task.clock.epoch
        is_full = clock.trained_batches * task.length.batch_size >= len(self.queue)
        is_start = task.train and clock.batch_in_epoch == 0
        if is_start and is_full and epoch % self.config.cluster_every == 0:
            draws = torch.Generator().manual_seed(
                hash_words(task.config.train.seed, _GROUPS, epoch)
            )
            centroids, _ = spherical_kmeans(self.queue.rows, len(self.groups), generator=draws)
            self.groups.copy_(centroids)

    def on_forward(self, task: Task) -> None:
        """Set ``batch["group"]`` (2, B), the group of the teacher's output for the other view.

        Projections of both views will move the groups. The teacher's output for the first view will
        enter the queue.
        """
        batch = task.last_batch
        targets = F.normalize(to_float32(self.teacher(batch.input)), dim=2)  # (2, B, D)
        batch["group"] = nearest_group(targets, self.groups).flip(0)  # (2, B), of the other view
        if task.train:
            self.pending.append((batch.output[:, :, 0].detach(), targets[0]))

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss for ``output`` (2, B, 2, D), averaged over both directions."""
        projection, prediction = output.unbind(2)  # (2, B, D)
        return grouping_loss(
            prediction, self.moved(projection), batch["group"], temperature=self.config.temperature
        )

    def moved(self, projection: Tensor) -> Tensor:
        """Return the groups (K, D) after the projections (2, B, D) of all ranks have moved them."""
        units = F.normalize(to_float32(projection), dim=2).flatten(0, 1)
        return moved_groups(self.groups, units, momentum=self.config.group_momentum)

    @torch.no_grad()
    def on_update(self, task: Task) -> None:
        """Move the groups by the projections of the step's batches, then enqueue its images."""
        super().on_update(task)
        for projection, targets in self.take_pending():
            self.groups.copy_(self.moved(projection))
            self.queue.update(targets)

    @property
    def chance_loss(self) -> float:
        """Loss of equal probabilities: ln(``num_groups``)."""
        return math.log(self.config.num_groups)


@torch.no_grad()
@in_full_precision
def nearest_group(features: Tensor, groups: Tensor) -> Tensor:
    """Return the index (...) of the group with the largest cosine for each of features (..., D)."""
    return (features @ F.normalize(groups, dim=1).T).argmax(dim=-1)


@in_full_precision
def moved_groups(groups: Tensor, projection: Tensor, *, momentum: float) -> Tensor:
    """Return the groups (K, D), moved toward the mean of their members on all ranks.

    A group without members does not change. The gradient flows through the projections.

    Args:
        groups: (K, D).
        projection: Projections of N views of this rank's images, (N, D) unit vectors. Each is a
            member of its nearest group.
        momentum: Share of the old groups, beta.
    """
    nearest = nearest_group(projection, groups)
    sums, counts = map(sum_with_grad, cluster_sums(projection, nearest, len(groups)))
    count = counts[:, None]
    moved = momentum * groups + (1 - momentum) * sums / count.clamp(min=1)
    return torch.where(count > 0, moved, groups)


@in_full_precision
def grouping_loss(
    prediction: Tensor, groups: Tensor, group: Tensor, *, temperature: float
) -> Tensor:
    """Return the cross-entropy of predictions with their groups, averaged.

    Args:
        prediction: (V, B, D).
        groups: (K, D), as moved by this batch.
        group: Groups to predict, (V, B).
        temperature: Temperature of the softmax over groups.
    """
    cosine = F.normalize(prediction, dim=2) @ F.normalize(groups, dim=1).T  # (V, B, K)
    return F.cross_entropy((cosine / temperature).flatten(0, 1), group.flatten())
