"""Balanced assignments and k-means against slow loops and another library."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ranks import run_ranks
from selftask.distributed.collectives import world_size
from selftask.distributed.simulated import SIMULATED
from selftask.models.clustering import sinkhorn_knopp, spherical_kmeans


def _paper_sinkhorn(
    scores: list[list[float]], epsilon: float, iterations: int
) -> list[list[float]]:
    """SwAV, listing in appendix A, with loops in double precision."""
    num, k = len(scores), len(scores[0])
    q = [[math.exp(scores[b][j] / epsilon) for b in range(num)] for j in range(k)]
    total = sum(map(sum, q))
    q = [[value / total for value in row] for row in q]
    for _ in range(iterations):
        for j in range(k):
            mass = sum(q[j])
            q[j] = [value / mass / k for value in q[j]]
        for b in range(num):
            mass = sum(q[j][b] for j in range(k))
            for j in range(k):
                q[j][b] /= mass * num
    return [[q[j][b] * num for j in range(k)] for b in range(num)]


@pytest.mark.parametrize(("epsilon", "iterations"), [(0.05, 3), (0.5, 1), (0.03, 10)])
def test_sinkhorn_is_the_listing_of_the_paper(epsilon: float, iterations: int) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(12, 5, generator=generator) * 2 - 1
    expected = torch.tensor(_paper_sinkhorn(scores.tolist(), epsilon, iterations))
    got = sinkhorn_knopp(scores, epsilon=epsilon, iterations=iterations)
    assert torch.allclose(got, expected, atol=2e-5)


def test_sinkhorn_balances_and_does_not_overflow() -> None:
    scores = torch.randn(64, 8) * 1e4
    scores[:, 3] -= 1e6  # in float32, its exponentials are all 0
    scores[5] -= 1e6
    got = sinkhorn_knopp(scores, epsilon=0.05, iterations=3)
    assert torch.isfinite(got).all()
    assert torch.allclose(got.sum(dim=1), torch.ones(64), atol=1e-5)
    mild = sinkhorn_knopp(torch.randn(64, 8), epsilon=1.0, iterations=50)
    assert torch.allclose(mild.sum(dim=0), torch.full((8,), 8.0), atol=1e-3)
    assert not sinkhorn_knopp(
        torch.randn(4, 2).requires_grad_(), epsilon=1, iterations=1
    ).requires_grad


def test_shares_follow_a_power_law() -> None:
    got = sinkhorn_knopp(torch.randn(64, 8), epsilon=1.0, iterations=50, power=0.5)
    shares = torch.arange(1.0, 9.0) ** -0.5
    assert torch.allclose(got.sum(dim=0) / 64, shares / shares.sum(), atol=1e-4)
    assert torch.allclose(got.sum(dim=1), torch.ones(64), atol=1e-5)


def _of_a_rank(rank: int) -> list[torch.Tensor]:
    """Assignments of this rank's part of 12 rows: 5 and 7, all together if alone."""
    scores = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    part = scores if world_size() == 1 else scores.split([5, 7])[rank]
    whole_or_nothing = scores if world_size() == 1 else scores.split([0, 12])[rank]
    return [
        *(sinkhorn_knopp(part, epsilon=0.5, iterations=3, power=p) for p in (0.0, 0.5)),
        sinkhorn_knopp(whole_or_nothing, epsilon=0.5, iterations=3),
    ]


def test_shares_are_those_of_the_rows_of_all_ranks() -> None:
    alone, ranks = _of_a_rank(0), run_ranks(_of_a_rank, 2)
    for whole, *parts in zip(alone, *ranks, strict=True):
        assert torch.allclose(torch.cat(parts), whole, atol=1e-6)


def test_traffic_of_sinkhorn_does_not_grow_with_the_number_of_ranks() -> None:
    scores = torch.zeros(2, 1000)
    with SIMULATED.of(1024):
        sinkhorn_knopp(scores, epsilon=0.5, iterations=3)
        largest_and_sum = 2 * 2 * scores[0].nbytes  # a ring sends each twice
        assert 0 < SIMULATED.bytes_of.total() <= 3 * largest_and_sum


def test_sinkhorn_needs_an_iteration() -> None:
    with pytest.raises(ValueError, match="at least one"):
        sinkhorn_knopp(torch.zeros(2, 2), epsilon=0.05, iterations=0)


def _three_clouds() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    centers = torch.eye(3, 16)
    labels = torch.arange(300) % 3
    return centers[labels] + 0.1 * torch.randn(300, 16, generator=generator), labels


def test_kmeans_finds_the_clouds_whatever_the_scale_of_rows() -> None:
    x, labels = _three_clouds()
    x = x * torch.rand(300, 1).add(0.1)
    for seed in range(5):
        centroids, cluster = spherical_kmeans(
            x, 3, iterations=20, generator=torch.Generator().manual_seed(seed), chunk=70
        )
        assert torch.allclose(centroids.norm(dim=1), torch.ones(3), atol=1e-5)
        pairs = {(int(a), int(b)) for a, b in zip(labels, cluster, strict=True)}
        if len(pairs) == 3:
            return
    pytest.fail("none of five starts found three separate clouds")


def test_kmeans_is_deterministic_and_its_parts_agree() -> None:
    x, _ = _three_clouds()
    first, second = (
        spherical_kmeans(x, 7, generator=torch.Generator().manual_seed(3), chunk=chunk)
        for chunk in (50, 50)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    centroids, cluster = first
    assert torch.equal(cluster, (F.normalize(x, dim=1) @ centroids.T).argmax(dim=1))


def test_kmeans_is_a_fixed_point_of_lloyd() -> None:
    x, _ = _three_clouds()
    unit = F.normalize(x, dim=1)
    centroids, cluster = spherical_kmeans(x, 4, iterations=100)
    for k in range(4):
        mean = sum(unit[i].double() for i in range(300) if cluster[i] == k)
        assert torch.allclose(F.normalize(mean, dim=0).float(), centroids[k], atol=1e-5)


def _lloyd(x: np.ndarray, centroids: np.ndarray, iterations: int) -> tuple[np.ndarray, np.ndarray]:
    """DeepCluster v2's k-means as loops: a cluster without rows keeps its centroid."""
    centroids = centroids.copy()
    for _ in range(iterations):
        cluster = (x @ centroids.T).argmax(axis=1)
        for k in range(len(centroids)):
            if (cluster == k).any():
                mean = x[cluster == k].mean(axis=0)
                centroids[k] = mean / np.linalg.norm(mean)
    return centroids, (x @ centroids.T).argmax(axis=1)


def test_kmeans_keeps_the_centroid_of_a_cluster_without_rows() -> None:
    x = torch.eye(4, 8).repeat_interleave(25, dim=0)  # four places, but equal rows drawn at first
    num_clusters = set()
    for seed in range(10):
        first = torch.randperm(100, generator=torch.Generator().manual_seed(seed))[:4]
        centroids, cluster = spherical_kmeans(
            x, 4, iterations=3, generator=torch.Generator().manual_seed(seed)
        )
        expected, labels = _lloyd(x.numpy(), x[first].numpy(), 3)
        assert np.allclose(centroids.numpy(), expected, atol=1e-6)
        assert np.array_equal(cluster.numpy(), labels)
        num_clusters.add(len(cluster.unique()))
    assert min(num_clusters) < 4


class LargestResult(TorchDispatchMode):
    """Measures the largest result of an operation, in bytes."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.size = max(self.size, result.nbytes)
        return result


def test_kmeans_takes_no_more_memory_than_the_cosines() -> None:
    x, _ = _three_clouds()
    with LargestResult() as largest:
        spherical_kmeans(x, 100, iterations=2)
    assert largest.size == 4 * 300 * 100


def test_kmeans_wants_a_row_for_each_cluster() -> None:
    with pytest.raises(ValueError, match="5 clusters of 4 rows"):
        spherical_kmeans(torch.randn(4, 2), 5)
