"""Cluster assignments: balanced ones (Sinkhorn-Knopp) and spherical k-means.

V views, B samples on this rank, K prototypes or clusters, N rows of a memory, D features.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.distributed import accelerator
from selftask.distributed.collectives import all_reduce_max, all_reduce_sum, world_size
from selftask.distributed.heartbeat import track
from selftask.models.precision import in_full_precision, to_float32


@torch.no_grad()
def sinkhorn_knopp(
    scores: Tensor, *, epsilon: float, iterations: int, power: float = 0.0, smallest: float = 0.0
) -> Tensor:
    """Assign the samples of all ranks to prototypes so that each prototype gets about its share.

    By default the shares are equal. Every rank must call this function.

    Eq. 3 to 5 of SwAV (arXiv:2006.09882). The paper alternates between scaling rows and columns of
    exp(scores / epsilon). Here the scaling is computed on logarithms, so that no exponential can
    overflow and no sum vanishes. The constant factors 1/K and 1/B are omitted, since the last
    normalization removes them.

    Args:
        scores: (B, K) of this rank, or (B, N, K) to balance each of the N positions separately
            (CAPI, arXiv:2502.08769, section 3.2).
        epsilon: Weight of the entropy; smaller values give harder assignments.
        iterations: Number of alternations.
        power: Prototype k, counted from 1, gets a share proportional to ``k ** -power``; for data
            whose classes have a long tail.
        smallest: Number added to the sum by which each sample is normalized. A sample whose scores
            are far below those of other samples for all prototypes is then assigned to no
            prototype.

    Returns:
        Assignments of the shape of ``scores``, in float32 (or float64 if ``scores`` are). They sum
        to one over K, or to less with ``smallest``.

    Raises:
        ValueError: If ``iterations`` is less than 1.
    """
    if iterations < 1:
        raise ValueError(f"sinkhorn_knopp needs at least one iteration, got {iterations}")
    logits = to_float32(scores) / epsilon
    numbers = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=logits.dtype)
    log_share = -power * numbers.log() if power else 0.0  # up to a constant
    for _ in range(iterations):
        mass = logsumexp_over_ranks(logits.logsumexp(dim=0))  # (K,) or (N, K)
        logits = _divide_by_sum(logits - mass + log_share, smallest)  # shares, then samples
    return logits.exp()


def _divide_by_sum(logits: Tensor, smallest: float) -> Tensor:
    """Return log(exp(logits) / (sum of exp(logits) over the last dimension + smallest))."""
    if not smallest:
        return logits.log_softmax(dim=-1)
    total = logits.logsumexp(dim=-1, keepdim=True)
    return logits - total.logaddexp(total.new_full((), math.log(smallest)))


def logsumexp_over_ranks(x: Tensor) -> Tensor:
    """Return log(sum of exp(x) over ranks) for each element of ``x``, which may be -inf.

    Every rank must call this function, with the same shape.
    """
    if world_size() == 1:
        return x
    largest = all_reduce_max(x).clamp(min=torch.finfo(x.dtype).min)
    return largest + all_reduce_sum((x - largest).exp()).log()


def swapped_cross_entropy(probs: Tensor, log_probs: Tensor) -> Tensor:
    """Return -sum_k p log q, averaged over images and over all pairs of *different* views.

    Eq. 3 of DINO (arXiv:2104.14294), eq. 6 of SwAV.

    Args:
        probs: p, assignments of the first A views, (A, B, K).
        log_probs: log q, predictions of all V views, (V, B, K).

    Returns:
        A scalar.
    """
    pairs = view_cross_entropy(probs, log_probs)  # (A, V)
    others = pairs.sum() - pairs.diagonal().sum()
    return others / (pairs.numel() - len(pairs))


@in_full_precision
def view_cross_entropy(probs: Tensor, log_probs: Tensor) -> Tensor:
    """Return -sum_k p log q of each pair of views, averaged over images.

    Computed as a batch of B matrix products, which is faster than A * V passes over (B, K). A
    single matrix product of the flattened (A, B * K) and (B * K, V) would use a GPU poorly, since
    the result has few entries.

    Args:
        probs: p, assignments of the first A views, (A, B, K).
        log_probs: log q, predictions of all V views, (V, B, K).

    Returns:
        (A, V).
    """
    products = torch.bmm(probs.transpose(0, 1), log_probs.permute(1, 2, 0))  # (B, A, V)
    return -products.mean(dim=0)


@torch.no_grad()
def spherical_kmeans(
    x: Tensor,
    num_clusters: int,
    *,
    iterations: int = 10,
    generator: torch.Generator | None = None,
    chunk: int = 16_384,
) -> tuple[Tensor, Tensor]:
    """Run k-means with cosine similarity, as in DeepCluster v2 (arXiv:2006.09882, appendix).

    The initial centroids are K different rows drawn with ``generator``; nothing else is random. An
    empty cluster keeps its centroid. Ranks get the same result if ``x`` and the generator's state
    are the same.

    Args:
        x: (N, D), not necessarily normalized.
        num_clusters: Number of clusters, K.
        iterations: Number of iterations.
        generator: Generator on the CPU; None: torch's global one.
        chunk: Rows compared at a time.

    Returns:
        Unit centroids (K, D), and the cluster of each row, int64 (N,).

    Raises:
        ValueError: If there are fewer rows than clusters.
    """
    if len(x) < num_clusters:
        raise ValueError(f"cannot make {num_clusters} clusters of {len(x)} rows; ask for fewer")
    x = F.normalize(to_float32(x), dim=1)
    first = torch.randperm(len(x), generator=generator)[:num_clusters]
    centroids = x[accelerator.copy_to(x.device, first)]  # (K, D)
    for _ in track("k-means", range(iterations)):
        cluster = _nearest(x, centroids, chunk)
        sums, counts = cluster_sums(x, cluster, num_clusters)
        centroids = torch.where(counts[:, None] > 0, F.normalize(sums, dim=1), centroids)
    return centroids, _nearest(x, centroids, chunk)


def _nearest(x: Tensor, centroids: Tensor, chunk: int) -> Tensor:
    """Return the index of the centroid with the largest cosine for each row, (N,)."""
    return torch.cat([(rows @ centroids.T).argmax(dim=1) for rows in torch.split(x, chunk)])


def cluster_sums(x: Tensor, cluster: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Return the sum of the rows of each cluster (K, D), and the number of its rows (K,).

    Sums are matrix products, whose order of summation is fixed, so that ranks and runs agree. The
    order of summation of ``index_add_`` on a GPU is not fixed.

    Args:
        x: (N, D).
        cluster: Cluster of each row, (N,) int64.
        num_clusters: Number of clusters, K.
    """
    sums = x.new_zeros(num_clusters, x.shape[1])
    counts = x.new_zeros(num_clusters)
    every = torch.arange(num_clusters, device=x.device)
    for rows, members in zip(x.split(16_384), cluster.split(16_384), strict=True):
        chosen = (members[:, None] == every).to(rows.dtype)  # one_hot would be of int64
        sums += chosen.T @ rows
        counts += chosen.sum(dim=0)
    return sums, counts
