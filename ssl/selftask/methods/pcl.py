"""PCL: MoCo with an additional term for clusters of all images, recomputed each epoch.

B: images per rank, N: images of the data set, D: width of the head, K: length of the queue,
H: clusterings, K_h: prototypes of clustering h.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import EMATeacher, Schedule, teacher_momentum
from selftask.methods.families.momentum_contrast import MomentumContrast
from selftask.models.clustering import spherical_kmeans
from selftask.models.feature_queue import FeatureQueue
from selftask.models.losses.contrast import info_nce
from selftask.models.memory_bank import MemoryBank
from selftask.models.precision import in_full_precision
from selftask.random.splitmix import hash_words
from selftask.registry import register_method

NO_CLUSTER = -100  # of images that were not read yet; cross_entropy ignores it
SMOOTHING = 10  # alpha of eq. 12: small clusters are not taken for dense ones
_CLUSTERING = 0x70636C6B  # "pclk": separates these draws from others of the same seed


@register_method("pcl")
class PCL(MomentumContrast, EMATeacher):
    """PCL (arXiv:2005.04966): MoCo that also recognizes the clusters of an image.

    Loss: ``InfoNCE - mean_h ln softmax(q.c/phi)[cluster]`` of a query q, with the centers c and
    densities phi of the clusters of each clustering h (eq. 11).

    Published: ImageNet linear top-1 of ResNet-50 67.6 after 200 epochs, version 2 (authors'
    README).

    Use it in place of ``moco`` if images form groups; it clusters all images in each epoch.

    Differs from the authors' code:

    * Clusters are computed from the teacher's latest output for each image, stored in a memory; in
      the authors' code, from an additional pass over the images without augmentation.
    * k-means is spherical and starts once; in the authors' code its centers are normalized at the
      end, and the best of five starts is taken.
    * All other clusters are negatives, each once. In the authors' code they are 16,384 random
      clusters and those of other images of the batch, which may include the cluster of the image
      itself.
    """

    paper = (
        "Li et al., Prototypical Contrastive Learning of Unsupervised Representations, ICLR 2021"
    )
    columns = {
        "instance": "Term of the loss: a view recognizes the key of the other one.",
        "prototypes": "Term of the loss: a view recognizes its clusters; 0 before the first ones.",
    }
    requires = ("index",)  # the memory has an entry for each image

    @dataclass(frozen=True, kw_only=True)
    class Config(MomentumContrast.Config, EMATeacher.Config):
        momentum: Schedule = teacher_momentum(0.999)
        """Momentum of the teacher."""
        queue_size: int = setting(16_384, min=1, tiny=lambda batch: 2 * batch)
        """Length of the queue, in keys; K, r in the paper."""
        num_prototypes: list[int] = setting([25_000, 50_000, 100_000], tiny=[4, 5, 6])
        """Number of prototypes of each clustering, K_h."""
        warmup_epochs: int = setting(20, min=1, tiny=1)
        """Number of epochs without prototypes, at the start."""
        kmeans_iterations: int = setting(20, min=0)
        """Number of iterations of k-means in each epoch."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            yield from super().problems(config)
            if not self.num_prototypes or min(self.num_prototypes) < 2:
                yield (
                    f"num_prototypes: {self.num_prototypes}; one number for each clustering is "
                    "expected, at least 2 each, such as [25000, 50000, 100000]"
                )

    prototypes: Tensor
    densities: Tensor
    assignments: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.queue = FeatureQueue(config.queue_size, config.out_dim)
        total = sum(config.num_prototypes)  # K_1 + ... + K_H
        self.register_buffer("prototypes", torch.zeros(total, config.out_dim))
        self.register_buffer("densities", torch.ones(total))
        self.has_clusters = False

    def setup(self, task: Task) -> None:
        """Allocate memory and assignments. Raise UserError for fewer images than clusters."""
        super().setup(task)
        config, num_images = self.config, task.data_module.num_images
        if max(config.num_prototypes) > num_images:
            raise UserError(
                f"method.num_prototypes={config.num_prototypes}: {num_images} images cannot make "
                f"{max(config.num_prototypes)} clusters; a tenth of the images is plenty"
            )
        self.memory = MemoryBank(num_images, config.out_dim)
        self.memory.rows.zero_()  # of images that were not read
        assignments = torch.full((len(config.num_prototypes), num_images), NO_CLUSTER)
        self.register_buffer("assignments", assignments)  # (H, N)

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Use the first view as query and the second as key."""
        batch.input = batch.all_views[:1]

    def on_phase_start(self, task: Task) -> None:
        """Cluster the memory as each epoch starts after the warm-up; not at a resume within it."""
        if not task.train:
            return
        self.has_clusters = task.clock.epoch >= self.config.warmup_epochs
        if self.has_clusters and task.clock.batch_in_epoch == 0:
            self.cluster_memory(task.config.train.seed, task.clock.epoch)

    @torch.no_grad()
    def cluster_memory(self, seed: int, epoch: int) -> None:
        """Set prototypes, densities and assignments of all clusterings.

        The result depends on memory, seed and epoch only, so it is the same on every rank. Raises
        UserError for fewer images than clusters; an epoch omits some images, since its last partial
        batch is dropped.
        """
        config = self.config
        is_filled = self.memory.rows.any(dim=1)  # (N,)
        rows = self.memory.rows[is_filled]
        if max(config.num_prototypes) > len(rows):
            raise UserError(
                f"method.num_prototypes={config.num_prototypes}: {len(rows)} images that were read "
                f"so far cannot make {max(config.num_prototypes)} clusters; ask for fewer"
            )
        draws = torch.Generator().manual_seed(hash_words(seed, _CLUSTERING, epoch))
        prototypes, densities = (
            x.split(config.num_prototypes) for x in (self.prototypes, self.densities)
        )
        self.assignments.fill_(NO_CLUSTER)
        for clustering, number in enumerate(config.num_prototypes):
            centers, clusters = spherical_kmeans(
                rows, number, iterations=config.kmeans_iterations, generator=draws
            )
            distances = (rows - centers[clusters]).norm(dim=1)
            prototypes[clustering].copy_(centers)
            densities[clustering].copy_(
                cluster_densities(distances, clusters, number, mean=config.temperature)
            )
            self.assignments[clustering, is_filled] = clusters

    def on_forward(self, task: Task) -> None:
        """Compute ``batch["keys"]`` (B, D); queue and memory get them after the step."""
        batch = task.last_batch
        (batch["keys"],) = self.unit_keys(batch.all_views[1:])  # (B, D)
        if task.train:
            self.pending.append((batch["keys"], batch.index))

    def enqueue(self, keys: Tensor, index: Tensor) -> None:  # type: ignore[override]
        """Enqueue keys (B, D), and store them as entries ``index`` (B,) of the memory."""
        super().enqueue(keys)
        self.memory.update(index, keys)

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return both terms of eq. 11 for ``output`` (1, B, D)."""
        instance = info_nce(
            output, batch["keys"][None], self.queue.rows[None], temperature=self.config.temperature
        )
        sizes = self.config.num_prototypes
        terms = [
            prototype_loss(output[0], *clustering)
            for clustering in zip(
                self.prototypes.split(sizes),
                self.densities.split(sizes),
                self.assignments[:, batch.index],
                strict=True,
            )
        ]
        return {"instance": instance, "prototypes": torch.stack(terms).mean()}

    @property
    def chance_loss(self) -> float:
        """Loss of equal similarities: ln(1 + ``queue_size``) + mean ln(``num_prototypes``).

        The second term is 0 until images are clustered.
        """
        logs = [math.log(number) for number in self.config.num_prototypes]
        return super().chance_loss + (sum(logs) / len(logs) if self.has_clusters else 0.0)


@torch.no_grad()
@in_full_precision
def cluster_densities(
    distances: Tensor, clusters: Tensor, num_clusters: int, *, mean: float
) -> Tensor:
    """Return the concentration phi of each cluster (eq. 12), (K_h,): small for a dense cluster.

    phi is the mean distance from the center, divided by ln(size + ``SMOOTHING``). Clusters of fewer
    than two images get the largest phi. Values are clipped to the 10th and 90th percentile, and
    then scaled to the given mean; they are above zero.

    Args:
        distances: Distance of each image from the center of its cluster, (N,).
        clusters: Cluster of each image, (N,).
        num_clusters: Number of clusters, K_h.
        mean: Mean of the result.
    """
    clusters, values = clusters.cpu(), distances.cpu().double()  # where sums have a fixed order
    sizes = clusters.new_zeros(num_clusters).index_add(0, clusters, torch.ones_like(clusters))
    sums = values.new_zeros(num_clusters).index_add(0, clusters, values).to(distances.dtype)
    density = sums / sizes.clamp(min=1) / (sums.new_tensor(SMOOTHING) + sizes).log()
    density = torch.where(sizes > 1, density, density.masked_fill(sizes < 2, 0).max())
    bounds = density.quantile(density.new_tensor([0.1, 0.9]))
    smallest = torch.finfo(density.dtype).eps  # clusters of equal images would have zero
    density = density.clamp(*bounds).clamp(min=smallest)
    return mean * density / density.mean()


@in_full_precision
def prototype_loss(
    query: Tensor, prototypes: Tensor, densities: Tensor, clusters: Tensor
) -> Tensor:
    """Return -log softmax(query.prototype / density) of the image's cluster, averaged over images.

    Images without a cluster count as 0.

    Args:
        query: (B, D), not necessarily normalized.
        prototypes: Unit vectors (K_h, D).
        densities: (K_h,).
        clusters: Cluster of each image, (B,), or ``NO_CLUSTER``.
    """
    scores = F.normalize(query, dim=1) @ prototypes.T / densities
    return F.cross_entropy(scores, clusters, reduction="none").mean()
