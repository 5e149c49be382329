"""InfoNCE with negatives of a queue or of all ranks, and shuffled BatchNorm (MoCo).

B: images per rank, W: ranks, V: views, or sets of queries each with its own queue, D: width, K:
length of a queue.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.distributed.collectives import all_to_all_cat, gather_cat_with_grad, rank, world_size
from selftask.models.precision import in_full_precision


@in_full_precision
def info_nce(
    query: Tensor, key: Tensor, queue: Tensor, own: Tensor | None = None, *, temperature: float
) -> Tensor:
    """Return InfoNCE, the mean of -log(exp(q.k / tau) / sum_x exp(q.x / tau)).

    MoCo (arXiv:1911.05722), eq. 1. For a query q, x is its key k, each entry of its queue and each
    of its own negatives. The mean is over all queries of this rank.

    Args:
        query: (V, B, D), not necessarily normalized.
        key: (V, B, D), unit vectors.
        queue: (V, K, D), unit vectors. Must not yet hold ``key``: if a positive is among its own
            negatives, the loss cannot fall below log 2.
        own: (V, B, M, D), M further negatives of each query, unit vectors; None: there are none.
        temperature: Temperature, tau.
    """
    query = F.normalize(query, dim=2)
    positive = (query * key).sum(dim=2, keepdim=True)  # (V, B, 1)
    negatives = [query @ queue.transpose(1, 2)]  # (V, B, K)
    if own is not None:
        negatives.append((own @ query.unsqueeze(3)).squeeze(3))  # (V, B, M)
    logits = (torch.cat([positive, *negatives], dim=2) / temperature).flatten(0, 1)  # (VB, 1 + K)
    return F.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.long))


@in_full_precision
def gathered_cross_entropy(query: Tensor, key: Tensor, *, scale: float | Tensor) -> Tensor:
    """Return the mean cross-entropy of queries with their keys among the keys of all ranks.

    The mean is over the queries of this rank. Gradients reach the keys of every rank.

    Args:
        query: (B, D), usually of unit length.
        key: (B, D); row b belongs to query b.
        scale: Factor of the similarities, 1 / temperature.
    """
    logits = scale * query @ gather_cat_with_grad(key).T  # (B, B * W)
    matches = torch.arange(len(query), device=query.device) + rank() * len(query)
    return F.cross_entropy(logits, matches)


@in_full_precision
def recognition_loss(query: Tensor, candidates: Tensor, *, temperature: float) -> Tensor:
    """Return the mean cross-entropy of this rank's queries with their keys among all candidates.

    Args:
        query: (B, D), not necessarily normalized.
        candidates: Unit vectors (WB + K, D): the keys of all ranks, then K other candidates.
        temperature: Divisor of the cosines, tau.
    """
    logits = F.normalize(query, dim=1) @ candidates.T / temperature
    return F.cross_entropy(
        logits, torch.arange(len(query), device=logits.device) + rank() * len(query)
    )


def view_cosines(views: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the cosines of this rank's views with the views of all ranks; differentiable.

    Args:
        views: V tensors of features (B, D), not necessarily normalized.

    Returns:
        Cosines (VB, VBW), view after view in both dimensions, and columns (V, VB). For row r of
        view v, ``columns[s, r]`` is the column of view v + s (modulo V) of the same image;
        ``columns[0, r]`` is that of the row itself.
    """
    units = [F.normalize(view, dim=1) for view in views]
    everyone = torch.cat([gather_cat_with_grad(unit) for unit in units])  # (VBW, D)
    cosines = torch.cat(units) @ everyone.T
    count, num_images = len(views), len(everyone) // len(views)  # V, B * W
    index = torch.arange(len(views[0]), device=cosines.device) + rank() * len(views[0])  # (B,)
    columns = torch.stack([index + view * num_images for view in range(count)])  # (V, B)
    return cosines, torch.stack([columns.roll(-shift, 0).flatten() for shift in range(count)])


def positives_and_negatives(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines of both views of each image, and their cosines with other images' views.

    Args:
        first: (B, D), not necessarily normalized.
        second: (B, D); row b is the other view of image b.

    Returns:
        Positives (2B,), and negatives (2B, 2BW) whose entries of the same image are -inf.
    """
    cosines, same = view_cosines((first, second))
    positives = cosines.gather(1, same[1][:, None]).squeeze(1)
    return positives, cosines.scatter(1, same.T, -torch.inf)


def shuffle_bn(images: Tensor) -> Tensor:
    """Return every W-th image of the global batch, for shuffled BatchNorm (MoCo, section 3.3).

    The first is image ``rank()``. Every rank must call this function, with images (B, ...) of the
    same shape. A query and its key are then normalized with statistics of different images;
    otherwise these statistics would reveal the match. The global batch is in random order, so
    taking every W-th image replaces the paper's random permutation.
    """
    if world_size() == 1:
        return images
    sent, received = _rows_between(rank(), world_size(), len(images))
    return all_to_all_cat(images[_by_rank(images)], sent, received)


def unshuffle_bn(rows: Tensor) -> Tensor:
    """Undo ``shuffle_bn``: return the rows (B, ...) of this rank's own images.

    Every rank must call this function.
    """
    if world_size() == 1:
        return rows
    sent, received = _rows_between(rank(), world_size(), len(rows))
    by_rank = all_to_all_cat(rows, received, sent)
    return by_rank[_by_rank(rows).argsort()]


def _by_rank(rows: Tensor) -> Tensor:
    """Return the order of this rank's rows by the rank that ``shuffle_bn`` sends them to, (B,)."""
    number = torch.arange(len(rows), device=rows.device) + rank() * len(rows)
    return (number % world_size()).argsort(stable=True)


@functools.cache
def _rows_between(rank: int, num_ranks: int, num_rows: int) -> tuple[list[int], list[int]]:
    """Return the numbers of rows that ``shuffle_bn`` sends to and receives from each rank."""

    def count(source: int, to: int) -> int:  # of image numbers of a source, equal to `to` modulo W
        return len(range((to - source * num_rows) % num_ranks, num_rows, num_ranks))

    ranks = range(num_ranks)
    return [count(rank, to) for to in ranks], [count(source, rank) for source in ranks]
