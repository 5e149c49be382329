"""DeepCluster v2: cluster the features of all images, predict the clusters, and repeat.

Sections and equations are those of the paper and its appendix; v1 is Caron et al., ECCV 2018,
arXiv:1807.05520.

V: views, the first two of which are stored; B: images per rank; N: images of the data set; D:
width of the head; H: clusterings, K_h prototypes each.
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
from selftask.methods.base import Task
from selftask.methods.families.clustered_images import NO_CLUSTER, ClusteredImages
from selftask.models.clustering import spherical_kmeans
from selftask.models.heads import mlp
from selftask.models.precision import to_float32
from selftask.random.splitmix import hash_words
from selftask.registry import register_method

_CLUSTERING = 0x6B6D6E73  # "kmns": separates these draws from others of the same seed


@register_method("deepcluster")
class DeepCluster(ClusteredImages):
    """DeepCluster v2 (arXiv:2006.09882): predicts clusters of all images, renewed each epoch.

    Loss: ``-log softmax(z.c/tau)[cluster]`` of features z and centroids c, mean over heads.

    Published: ImageNet linear top-1 of ResNet-50 75.2 after 800 epochs with multi-crop (SwAV's
    README).

    Use it for data sets whose features fit in memory, since all are clustered each epoch.

    Differs from the authors' code:

    * The memory is filled in evaluation mode (in the authors' code, in training mode), so that a
      feature does not depend on the other images of its batch.
    * First centroids are drawn from all images, not from those of rank 0. Every process runs the
      whole k-means, which gives the same result without communication.
    """

    paper = (
        "Caron et al., Unsupervised Learning of Visual Features by Contrasting Cluster "
        "Assignments, NeurIPS 2020"
    )
    columns = {"largest_cluster": "Share of images in the largest cluster, 0 to 1; 1 is collapse."}
    loss_reduction = "samples"
    views = (2, None)
    num_remembered = 2

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(128, min=1, tiny=16)
        """Width of the head's output, D."""
        hidden_dim: int = setting(2048, min=1, tiny=32)
        """Width of the head's hidden layer."""
        norm: bool = True
        """Whether the head has BatchNorm."""
        num_prototypes: list[int] = setting([3000, 3000, 3000], tiny=[6, 5, 4])
        """Numbers of prototypes of the heads, K_h."""
        temperature: float = setting(0.1, above=0)
        """Temperature of the softmax over prototypes."""
        kmeans_iterations: int = setting(10, min=0)
        """Number of iterations of k-means in each epoch."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if not self.num_prototypes or min(self.num_prototypes) < 2:
                yield (
                    f"num_prototypes: {self.num_prototypes}; one number for each clustering is "
                    "expected, at least 2 each, such as [3000, 3000, 3000]"
                )

    prototypes: Tensor
    assignments: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        prototypes = torch.zeros(sum(config.num_prototypes), config.out_dim)
        self.register_buffer("prototypes", prototypes)  # (K_1 + ... + K_H, D): never trained

    def build_head(self, embed_dim: int) -> nn.Module:
        return mlp(embed_dim, self.config.hidden_dim, self.config.out_dim, norm=self.config.norm)

    def setup(self, task: Task) -> None:
        """Allocate the memory. Raise UserError if there are fewer images than clusters."""
        super().setup(task)
        config = self.config
        num_images = self.build_memory(task, "num_prototypes", max(config.num_prototypes))
        assignments = torch.full((len(config.num_prototypes), num_images), NO_CLUSTER)
        self.register_buffer("assignments", assignments)  # (H, N)

    def on_phase_start(self, task: Task) -> None:
        """Cluster the memory at the start of an epoch; before the first one, fill it.

        Nothing is clustered if the run is resumed within an epoch. The share of the largest cluster
        of the first head is logged.
        """
        if not task.train or task.clock.batch_in_epoch != 0:
            return
        if task.clock.batch == 0:
            self.fill_memory(task)
        self.cluster_memory(task.config.train.seed, task.clock.epoch)
        sizes = self.assignments[0][self.assignments[0] != NO_CLUSTER].bincount()
        task.log("largest_cluster", sizes.max() / sizes.sum())  # close to 1: a collapse

    @torch.no_grad()
    def cluster_memory(self, seed: int, epoch: int) -> None:
        """Set the prototypes and assignments of each head by k-means.

        Heads alternate between the two views.

        The result depends on memory, seed and epoch only, so it is the same on every rank.
        """
        is_filled = self.memory.rows[:, 0].any(dim=1)  # (N,)
        draws = torch.Generator().manual_seed(hash_words(seed, _CLUSTERING, epoch))
        for head, prototypes in enumerate(self.prototypes.split(self.config.num_prototypes)):
            centroids, assignments = spherical_kmeans(
                self.memory.rows[is_filled, head % self.num_remembered],
                len(prototypes),
                iterations=self.config.kmeans_iterations,
                generator=draws,
            )
            prototypes.copy_(centroids)
            self.assignments[head, is_filled] = assignments

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy of views (V, B, D) with their clusters, averaged over heads.

        The loss of images without a cluster is 0.
        """
        with torch.autocast(output.device.type, enabled=False):
            features = F.normalize(to_float32(output), dim=2)  # (V, B, D)
            scores = features.flatten(0, 1) @ self.prototypes.T  # (V * B, K_1 + ... + K_H)
        by_head = (scores / self.config.temperature).split(self.config.num_prototypes, dim=1)
        assignments = self.assignments[:, batch.index].repeat(1, len(features))  # (H, V * B)
        losses = [
            F.cross_entropy(*pair, reduction="none")
            for pair in zip(by_head, assignments, strict=True)
        ]
        return torch.stack(losses).mean()

    def on_update(self, task: Task) -> None:
        """Store the features of the batch in the memory, on every rank."""
        for index, features in self.take_pending():
            self.memory.update(index, features)

    @property
    def chance_loss(self) -> float:
        """Loss of equal probabilities: ln(``num_prototypes``), mean over heads."""
        logs = [math.log(number) for number in self.config.num_prototypes]
        return sum(logs) / len(logs)
