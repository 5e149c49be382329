"""Feature queue: the features of the latest images, as in MoCo (arXiv:1911.05722, section 3.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.distributed.collectives import all_gather_cat
from selftask.models.precision import in_full_precision

_TEMPERATURE = 0.07  # of the votes, as in evaluations by k-NN


class FeatureQueue(nn.Module):
    """First-in, first-out queue, equal on every rank, saved and resumed as buffers.

    Methods read ``rows`` in ``forward`` and call ``update`` in ``on_update``. The initial entries
    are random unit vectors.

    Args:
        length: Number of entries, K.
        shape: Shape of an entry: ``dim``, or several sizes of which the last is ``dim``.
    """

    rows: Tensor
    """``(K, *shape)``, in no particular order."""
    oldest: Tensor
    """Index of the entry that is replaced next, an int64 scalar."""

    def __init__(self, length: int, *shape: int) -> None:
        super().__init__()
        self.register_buffer("rows", F.normalize(torch.randn(length, *shape), dim=-1))
        self.register_buffer("oldest", torch.zeros((), dtype=torch.long))

    def __len__(self) -> int:
        return len(self.rows)

    @torch.no_grad()
    def nearest(self, queries: Tensor) -> Tensor:
        """Return the entry with the largest cosine for each query, ``(..., dim)``.

        Entries must be unit vectors of shape ``(dim,)``. Call this method before the queries are
        enqueued; otherwise each query finds itself.
        """
        return self.nearest_few(queries, 1).squeeze(-2)

    @torch.no_grad()
    @in_full_precision
    def nearest_few(self, queries: Tensor, count: int, *, after: Tensor | None = None) -> Tensor:
        """Return the ``count`` nearest entries by cosine, ``(..., count, dim)``, nearest first.

        Entries must be unit vectors of shape ``(dim,)``.

        Args:
            queries: ``(..., dim)``.
            count: Number of entries, at most K.
            after: Rows ``(B, dim)``. If given, search the entries that the queue will have after
                ``update(after)``; every rank must then call this method.
        """
        similar = queries.to(self.rows.dtype) @ self.rows.T  # (..., K)
        if after is None:
            return self.rows[similar.topk(count, dim=-1).indices]
        rows, replaced = self._enqueued(after)
        similar = similar.index_fill(-1, replaced, -torch.inf)
        similar = torch.cat([similar, queries.to(rows.dtype) @ rows.T], dim=-1)
        index = similar.topk(count, dim=-1).indices
        older, newer = index.clamp(max=len(self) - 1), (index - len(self)).clamp(min=0)
        return torch.where((index < len(self))[..., None], self.rows[older], rows[newer])

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Replace the oldest entries by ``rows`` ``(B, *shape)``. Every rank must call this method.

        Rows are enqueued in the order of the global batch. If there are more than K, the last K are
        kept.
        """
        rows, indices = self._enqueued(rows)
        self.rows.index_copy_(0, indices, rows)
        self.oldest.add_(len(rows)).remainder_(len(self))

    def _enqueued(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of all ranks to enqueue, and the indices of the entries they replace."""
        rows = all_gather_cat(rows)[-len(self) :].to(self.rows.dtype)  # (W * B, *shape)
        return rows, (torch.arange(len(rows), device=rows.device) + self.oldest) % len(self)


class LabeledQueue(nn.Module):
    """Queue of the latest features and labels, which classifies a batch before enqueuing it.

    The initial entries have the label -1. Entries with this label do not vote.

    Args:
        length: Number of entries, K.
        width: Number of features, E.
        num_classes: Number of classes, C.
        num_neighbors: Number of nearest entries that vote.
        device: Device of the features.
    """

    rows: Tensor
    labels: Tensor
    entered: Tensor
    counted: Tensor
    hits: Tensor
    images: Tensor

    def __init__(
        self, length: int, width: int, num_classes: int, num_neighbors: int, device: torch.device
    ) -> None:
        super().__init__()
        self.num_classes, self.num_neighbors = num_classes, num_neighbors
        self.register_buffer("rows", torch.zeros(length, width, device=device))  # unit vectors
        self.register_buffer("labels", torch.full((length,), -1, device=device))
        for name in ("hits", "images"):  # since `take_accuracy`
            self.register_buffer(name, torch.zeros((), dtype=torch.long, device=device))
        for name in ("entered", "counted"):  # images so far, steps; on the CPU, to be read freely
            self.register_buffer(name, torch.zeros((), dtype=torch.long))
        self._pending: list[Tensor] = []

    def clear(self) -> None:
        """Discard the batches added since the last update."""
        self._pending.clear()

    @torch.no_grad()
    def add(self, features: Tensor, labels: Tensor) -> None:
        """Classify a batch of this rank, to be enqueued by the next ``update``.

        Args:
            features: (B, E), not necessarily normalized.
            labels: int64 (B,), -1 for unlabeled images, which do not count for the accuracy.
        """
        units = F.normalize(features.to(self.rows.dtype), dim=1)
        cosines = (units @ self.rows.T).masked_fill(self.labels < 0, -1e4)
        cosine, index = cosines.topk(self.num_neighbors, dim=1)  # (B, k)
        neighbors = self.labels[index].clamp(min=0)
        votes = class_votes(cosine, neighbors, self.num_classes, _TEMPERATURE)
        is_hit = (votes.argmax(dim=1) == labels) & (labels >= 0)
        self._pending.append(torch.cat([units, labels[:, None], is_hit[:, None]], dim=1))

    @torch.no_grad()
    def update(self) -> None:
        """Enqueue the batches of all ranks in rank order, after at least one ``add``.

        Every rank must call this method. A step counts for the accuracy if the queue was full
        before it.
        """
        rows = all_gather_cat(torch.cat(self._pending))  # (W * B, E + 2)
        self.clear()
        labels = rows[:, -2].long()
        entered = int(self.entered)
        if entered >= len(self.rows):
            self.hits += rows[:, -1].sum().long()
            self.images += (labels >= 0).sum()
            self.counted += 1
        last = slice(max(0, len(rows) - len(self.rows)), None)
        index = (torch.arange(len(rows), device=rows.device)[last] + entered) % len(self.rows)
        self.rows.index_copy_(0, index, rows[last, :-2])
        self.labels.index_copy_(0, index, labels[last])
        self.entered += len(rows)

    def take_accuracy(self) -> Tensor | None:
        """Return the accuracy since the last call, or None if no step counted; reset the counts.

        It is a scalar tensor: the fraction of labeled images that were classified correctly.
        """
        accuracy = self.hits / self.images.clamp(min=1) if self.counted else None
        for count in (self.hits, self.images, self.counted):
            count.zero_()
        return accuracy


def class_votes(cosine: Tensor, labels: Tensor, num_classes: int, temperature: float) -> Tensor:
    """Return the sum of the neighbors' weights for each class, (B, C).

    Args:
        cosine: (B, k), nearest first.
        labels: int64 (B, k), labels of the neighbors, at least 0.
        num_classes: Number of classes, C.
        temperature: Temperature of the weights exp((cosine - largest cosine) / temperature).
    """
    # relative to the nearest: the same vote, without overflow
    weight = ((cosine - cosine[:, :1]) / temperature).exp()
    return weight.new_zeros(len(weight), num_classes).scatter_add_(1, labels, weight)
