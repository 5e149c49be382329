"""Weighted k nearest neighbours on frozen features.

Wu et al. (arXiv:1805.01978), section 3.4, as DINO and most others report it: the k training images
of largest cosine s vote for their class with weight exp(s / temperature).

N training images, B test images of one chunk, E features, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.evaluate.features import Features
from selftask.logs import get_logger
from selftask.pulse import each
from selftask.registry import register_evaluation

log = get_logger(__name__)

_TEST_ROWS = 512
_TRAIN_ROWS = 32_768  # one block of similarities has 64 MiB, and there is only one


@register_evaluation("knn")
@dataclass(frozen=True, kw_only=True)
class KNN:
    """Top-1 of weighted nearest neighbours: knn_top1 for the first k, knn_top1_k200 for others."""

    k: list[int] = field(default_factory=lambda: [20])  # neighbours that vote; all in one pass
    temperature: float = 0.07  # smaller: the nearest counts more

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if not self.k or min(self.k) < 1:
            yield f"k: {self.k}; numbers of neighbours are expected, each at least 1"
        if not self.temperature > 0:
            yield f"temperature: {self.temperature}; must be above 0"

    def __call__(self, train: Features, test: Features) -> dict[str, float]:
        """Fractions of test images. With ``test is train`` no image is its own neighbour."""
        return knn_accuracy(train, test, k=self.k, temperature=self.temperature)


def knn_accuracy(
    train: Features, test: Features, *, k: Sequence[int] = (20,), temperature: float = 0.07
) -> dict[str, float]:
    """``{"knn_top1": ..., "knn_top1_k200": ...}`` for k = (20, 200), in one pass over the pairs.

    With ``test is train`` each image is left out of its own neighbours. A k above the number of
    training images means all of them. Raises UserError without labels.
    """
    train.check_labels("k-NN, training set")
    test.check_labels("k-NN, test set")
    available = len(train) - (test is train)
    if max(k) > available:
        log.info("k-NN: k=%d means all %d training images", max(k), available)
    ks = [min(one, available) for one in k]
    num_classes = int(max(train.targets.max(), test.targets.max())) + 1

    correct = torch.zeros(len(ks), dtype=torch.int64, device=test.targets.device)
    first = 0
    for similarity, neighbour in _neighbours(train, test, max(ks)):  # (B, k), nearest first
        rows = slice(first, first + len(similarity))
        first += len(similarity)
        # exp(s / T) relative to the nearest: the same vote, and never an overflow
        weight = ((similarity - similarity[:, :1]) / temperature).exp()
        for place, count in enumerate(ks):
            votes = weight.new_zeros(len(weight), num_classes)
            votes.scatter_add_(1, train.targets[neighbour[:, :count]], weight[:, :count])
            correct[place] += (votes.argmax(dim=1) == test.targets[rows]).sum()
    names = [f"knn_top1_k{count}" if place else "knn_top1" for place, count in enumerate(k)]
    return dict(zip(names, (correct.double() / len(test)).tolist(), strict=True))


def _neighbours(train: Features, test: Features, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each chunk of test images, cosine and row of the k nearest: (B, k), nearest first.

    Similarities exist for one block of pairs at a time, in memory that is used again.
    """
    bank = F.normalize(train.features, dim=1).T  # (E, N), a view
    queries = F.normalize(test.features, dim=1)
    buffer = queries.new_empty(min(_TEST_ROWS, len(test)) * min(_TRAIN_ROWS, len(train)))
    for start in range(0, len(test), _TEST_ROWS):
        chunk = queries[start : start + _TEST_ROWS]  # (B, E)
        best = chunk.new_empty(len(chunk), 0)
        where = torch.empty(len(chunk), 0, dtype=torch.int64, device=chunk.device)
        for offset in each("k-NN", range(0, bank.shape[1], _TRAIN_ROWS)):
            block = bank[:, offset : offset + _TRAIN_ROWS]
            size = (len(chunk), block.shape[1])
            similarity = torch.mm(chunk, block, out=buffer[: size[0] * size[1]].view(size))
            if test is train:
                _leave_out(similarity, start - offset)
            values, rows = similarity.topk(min(k, size[1]), dim=1)
            best, where = torch.cat([best, values], dim=1), torch.cat([where, rows + offset], dim=1)
            best, order = best.topk(min(k, best.shape[1]), dim=1)
            where = where.gather(1, order)
        yield best, where


def _leave_out(similarity: Tensor, first: int) -> None:
    """Rule out the pair of row i with column ``first + i``, for those columns that are there."""
    rows = torch.arange(len(similarity), device=similarity.device)
    inside = rows[(rows + first >= 0) & (rows + first < similarity.shape[1])]
    similarity[inside, inside + first] = -torch.inf
