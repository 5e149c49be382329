"""ODC: predict clusters of all images; the clusters change with each step.

B: images per rank; N: images of the data set; D: width of the head; K: clusters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import all_gather_cat, all_reduce_mean
from selftask.errors import UserError
from selftask.methods.base import Task
from selftask.methods.families.clustered_images import NO_CLUSTER, ClusteredImages
from selftask.models.clustering import spherical_kmeans
from selftask.models.heads import mlp
from selftask.models.precision import in_full_precision
from selftask.random.splitmix import hash_words
from selftask.registry import register_method

_ITERATIONS = 20  # of k-means
_CLUSTERING = 0x6F6463  # "odc": separates these draws from others of the same seed


@register_method("odc")
class ODC(ClusteredImages):
    """ODC (arXiv:2006.10645): DeepCluster whose clusters change with each step.

    Loss: ``-w log softmax(W z + b)[cluster]`` of features z, with a classifier (W, b), divided by
    the mean of w over the batch; w is the inverse root of the size of the cluster.

    Published: ImageNet linear top-1 of ResNet-50 after 440 epochs: 57.7 on feature maps of the last
    stage, 53.4 on pooled features (OpenSelfSup's model zoo).

    Use it in place of ``deepcluster`` if its clusters change too much from epoch to epoch.

    Differs from the authors' code:

    * Small clusters are replaced before each epoch; in the authors' code, after each step.
    * The first clusters are found by spherical k-means of the initial features.
    * The mean of w is over the global batch; in the authors' code, over a GPU's batch.
    * The head has no dropout, and the classifier has the same optimizer momentum as other layers;
      in the authors' code it has none.
    """

    paper = (
        "Zhan et al., Online Deep Clustering for Unsupervised Representation Learning, CVPR 2020"
    )
    columns = {"largest_cluster": "Share of images in the largest cluster, 0 to 1; 1 is collapse."}
    loss_reduction = "statistics"  # the mean of w
    views = 1
    min_batch_size = 2  # BatchNorm in the head

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(256, min=1, tiny=16)
        """Width of the head's output, D."""
        hidden_dim: int = setting(512, min=1, tiny=32)
        """Width of the head's hidden layer."""
        num_clusters: int = setting(10_000, min=2, tiny=4)
        """Number of clusters, K."""
        momentum: float = setting(0.5, min=0, max=1)
        """Weight of the old features of an image in the memory."""
        renew_every: int = setting(10, min=1, tiny=2)
        """Number of steps after which the centroids are renewed."""
        min_size: int = setting(20, min=2, tiny=2)
        """Minimum number of images in a cluster; a smaller cluster is replaced by half of the
        largest.
        """

    labels: Tensor
    centroids: Tensor
    sizes: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.classifier = nn.Linear(config.out_dim, config.num_clusters)
        self.register_buffer("centroids", torch.zeros(config.num_clusters, config.out_dim))
        self.register_buffer("sizes", torch.zeros(config.num_clusters, dtype=torch.int64))

    def build_head(self, embed_dim: int) -> nn.Module:
        config = self.config

        def norm(width: int) -> nn.Module:
            return nn.BatchNorm1d(width, affine=False)

        return nn.Sequential(
            mlp(embed_dim, config.hidden_dim, config.out_dim, norm=norm), nn.ReLU()
        )

    def setup(self, task: Task) -> None:
        """Allocate memory and labels. Raise UserError if there are too few images."""
        config = self.config
        num_images = self.build_memory(task, "num_clusters", config.num_clusters)
        if config.min_size * config.num_clusters > num_images:
            raise UserError(
                f"method.min_size={config.min_size}: {num_images} images cannot make "
                f"{config.num_clusters} clusters of so many; lower method.num_clusters"
            )
        self.register_buffer("labels", torch.full((num_images,), NO_CLUSTER))

    def on_phase_start(self, task: Task) -> None:
        """Replace small clusters at the start of an epoch, and log the share of the largest one.

        Before the first epoch, fill the memory and make the clusters.
        """
        clock = task.clock
        if not task.train or clock.batch_in_epoch != 0:
            return
        seed = hash_words(task.config.train.seed, _CLUSTERING, clock.epoch)
        draws = torch.Generator().manual_seed(seed)
        if clock.batch == 0:
            self.fill_memory(task)
            self.make_clusters(draws)
        self.replace_small_clusters(draws)
        task.log("largest_cluster", self.sizes.max() / self.sizes.sum())

    @torch.no_grad()
    def make_clusters(self, draws: torch.Generator) -> None:
        """Set labels, centroids and sizes of the clusters by k-means of the memory."""
        rows = self.memory.rows[:, 0]
        is_filled = rows.any(dim=1)
        _, self.labels[is_filled] = spherical_kmeans(
            rows[is_filled], len(self.centroids), iterations=_ITERATIONS, generator=draws
        )
        self.renew_centroids()

    def renew_centroids(self) -> None:
        """Set the centroids to the means of their images, and ``sizes`` to their numbers."""
        self.centroids.copy_(cluster_means(self.memory.rows[:, 0], self.labels, self.centroids))
        self.sizes.copy_(cluster_sizes(self.labels, len(self.sizes)))

    @torch.no_grad()
    def replace_small_clusters(self, draws: torch.Generator) -> None:
        """Move the images of small clusters to other clusters, and split large ones to refill them.

        The result is the same on every rank.
        """
        rows, labels = self.memory.rows[:, 0], self.labels
        is_small = self.sizes < self.config.min_size  # (K,)
        if not is_small.any():
            return
        members = ((labels >= 0) & is_small[labels.clamp(min=0)]).nonzero()[:, 0]
        scores = rows[members] @ self.centroids.T
        labels[members] = scores.masked_fill(is_small, -math.inf).argmax(dim=1)
        for cluster in is_small.nonzero()[:, 0].tolist():
            sizes = cluster_sizes(labels, len(self.sizes))
            members = (labels == sizes.argmax()).nonzero()[:, 0]
            _, half = spherical_kmeans(rows[members], 2, iterations=_ITERATIONS, generator=draws)
            labels[members[half == 1]] = cluster
        self.renew_centroids()

    @in_full_precision
    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the weighted cross-entropy of the classifier for ``output`` (1, B, D).

        The weight of an image is the inverse root of the size of its cluster, divided by the mean
        over all ranks; it is 0 without a cluster.
        """
        labels = self.labels[batch.index]
        losses = F.cross_entropy(self.classifier(output[0]), labels, reduction="none")  # (B,)
        sizes = self.sizes[labels.clamp(min=0)].clamp(min=1).to(losses.dtype)
        weights = sizes.rsqrt() * (labels >= 0)
        return (weights * losses).mean() / all_reduce_mean(weights.mean())

    @torch.no_grad()
    def on_update(self, task: Task) -> None:
        """Update memory, labels and sizes; every ``renew_every`` steps, renew the centroids."""
        for index, features in self.take_pending():
            self.memory.update(index, features, self.config.momentum)
            everywhere = all_gather_cat(index)  # (W * B,)
            rows = self.memory[everywhere][:, 0]
            self.labels[everywhere] = (rows @ self.centroids.T).argmax(dim=1)
        if (task.steps_done + 1) % self.config.renew_every == 0:
            self.renew_centroids()
        self.sizes.copy_(cluster_sizes(self.labels, len(self.sizes)))

    @property
    def chance_loss(self) -> float:
        """Loss of equal scores: ln(``num_clusters``)."""
        return math.log(self.config.num_clusters)


def cluster_sizes(labels: Tensor, num_clusters: int) -> Tensor:
    """Return the number of images of each cluster, (K,), from the labels (N,)."""
    sizes = labels.new_zeros(num_clusters)
    return sizes.scatter_add_(0, labels.clamp(min=0), (labels >= 0).long())


def cluster_means(rows: Tensor, labels: Tensor, centroids: Tensor) -> Tensor:
    """Return the mean of the rows of each cluster, (K, D); an empty cluster keeps its centroid.

    Sums have a fixed order, so that ranks agree.

    Args:
        rows: (N, D).
        labels: (N,), the cluster of each row or ``NO_CLUSTER``.
        centroids: The previous centroids, (K, D).
    """
    sizes = cluster_sizes(labels, len(centroids))
    without = (labels < 0).sum()[None]
    order = labels.argsort(stable=True)  # rows without a cluster are first
    lengths = torch.cat([without, sizes])
    sums = torch.segment_reduce(rows[order], "sum", lengths=lengths, unsafe=True)[1:]
    return torch.where(sizes[:, None] > 0, sums / sizes[:, None].clamp(min=1), centroids)
