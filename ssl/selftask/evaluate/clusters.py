"""Clusters of frozen features, compared with the classes of the images.

N images, K clusters, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.evaluate.features import Features
from selftask.models.clustering import spherical_kmeans
from selftask.registry import register_evaluation


@dataclass(frozen=True, kw_only=True)
class KMeans:
    """Options of spherical k-means, a base class of evaluations."""

    restarts: int = setting(10, min=1)
    """Number of runs of k-means; the run with the largest sum of cosines is used."""
    iterations: int = setting(100, min=1)
    """Number of iterations of each run."""
    seed: int = setting(0, min=0)
    """Seed of the initial centers."""
    seeds: int = setting(1, min=1)
    """Number of seeds, from ``seed`` on, over which metrics are averaged."""

    def clusters_of(self, units: Tensor, k: int) -> Tensor:
        """Return the cluster of each vector in the best of ``restarts`` runs, int64 (N,).

        Args:
            units: Unit vectors, (N, E).
            k: Number of clusters, K.
        """
        generator = torch.Generator().manual_seed(self.seed)
        best = -torch.inf
        for _ in range(self.restarts):
            centers, cluster = spherical_kmeans(
                units, k, iterations=self.iterations, generator=generator
            )
            cosines = float((units * centers[cluster]).sum(dtype=torch.float64))
            if cosines > best:
                best, assigned = cosines, cluster
        return assigned


@register_evaluation("clusters")
@dataclass(frozen=True, kw_only=True)
class Clusters(KMeans):
    """Spherical k-means of the test images, compared with their classes: cluster_nmi, ..."""

    k: int | None = setting(None, min=2)
    """Number of clusters; null: the number of classes of the test images."""

    def __call__(self, train: Features, test: Features) -> dict[str, float]:
        """Return the metrics of ``agreement`` for the test images; training images are not used.

        Raises:
            UserError: If images have no labels, or there are fewer images than clusters.
        """
        test.check_labels("clusters")
        classes, target = torch.unique(test.targets, return_inverse=True)
        k = self.k or len(classes)
        if len(test) < k:
            raise UserError(f"clusters: {k} clusters of {len(test)} images; give more images")
        cluster = self.clusters_of(F.normalize(test.features, dim=1), k)
        return agreement(cluster.cpu().numpy(), target.cpu().numpy())


def agreement(cluster: np.ndarray, target: np.ndarray) -> dict[str, float]:
    """Compare the clusters (N,) of images with their classes (N,).

    Returns:
        ``cluster_nmi``: mutual information over the mean of the two entropies; ``cluster_ari``:
        adjusted Rand index; ``cluster_purity``: share of images in the most frequent class of their
        cluster; ``cluster_accuracy``: share of images in the cluster assigned to their class, for
        the one-to-one assignment with the largest share (Hungarian method).
    """
    from scipy.optimize import linear_sum_assignment  # slow to import
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
    from sklearn.metrics.cluster import contingency_matrix

    counts = contingency_matrix(target, cluster)  # (C, K)
    pairs = linear_sum_assignment(counts, maximize=True)
    return {
        "cluster_nmi": float(normalized_mutual_info_score(target, cluster)),
        "cluster_ari": float(adjusted_rand_score(target, cluster)),
        "cluster_purity": float(counts.max(axis=0).sum() / len(target)),
        "cluster_accuracy": float(counts[pairs].sum() / len(target)),
    }
