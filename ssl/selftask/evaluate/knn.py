"""Weighted k nearest neighbors on frozen features.

Wu et al. (arXiv:1805.01978), section 3.4, as reported by DINO and most other papers: the k training
images with the largest cosine s vote for their class with weight exp(s / temperature).

N training images, B test images of one chunk, E features, C classes. With several ranks, each rank
has a part of both sets. Chunks of test images are sent to all ranks, and each rank finds the
nearest of its own training images. The k nearest of these are the result. No rank stores all
features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.config.fields import setting
from selftask.distributed.collectives import gather_objects, rank, world_size
from selftask.evaluate.chunks import InChunks
from selftask.evaluate.features import Features, FileFeatures, check_targets
from selftask.evaluate.figure import Figure
from selftask.evaluate.label_counts import LabelCounts, require_labels
from selftask.evaluate.nearest import QUERIES, Bank
from selftask.models.feature_queue import class_votes
from selftask.registry import register_evaluation


@register_evaluation("knn")
@dataclass(frozen=True, kw_only=True)
class KNN:
    """Weighted k-NN accuracy: knn_top1 for the first k, and knn_top1_k200 for another k of 200."""

    takes_parts: ClassVar[bool] = True  # each rank passes its own part of the features
    takes_files: ClassVar[bool] = True

    k: list[int] = setting([20], min=1, nonempty=True)
    """Numbers of neighbors that vote; one metric for each."""
    temperature: float = setting(0.07, above=0)
    """Temperature of the votes; a smaller one gives nearer neighbors more weight."""
    search: Literal["float32", "int8"] = "float32"
    """Precision of the search; int8 is faster on CPUs with AVX512-BF16 or AMX, and finds the
    neighbors of float32 unless rounding errors exceed 8 standard deviations.
    """
    only_test_classes: bool = False
    """Whether neighbors are restricted to classes of the test set."""

    def label_problems(self, counts: LabelCounts) -> Iterator[str]:
        if self.only_test_classes:
            counts = counts.among_test_classes()
        if not counts.num_neighbors:
            yield "k: there are no other images to choose neighbors from"
        elif max(self.k) > counts.num_neighbors:
            yield (
                f"k: {max(self.k)} neighbors are asked for, and there are {counts.num_neighbors} "
                f"images to choose from; use at most {counts.num_neighbors}"
            )

    def __call__(
        self, train: Features | FileFeatures, test: Features | FileFeatures
    ) -> dict[str, float]:
        """Return the fraction of test images that are classified correctly, by metric name.

        If ``test is train``, no image is its own neighbor. With several ranks, every rank must
        call this with its own part of the features; all ranks get the result for all features.

        Raises:
            UserError: If images have no labels, or there are fewer than k neighbors.
        """
        targets = [torch.cat(gather_objects(part.targets)) for part in (train, test)]
        check_targets(targets[0], "k-NN, training set")
        check_targets(targets[1], "k-NN, test set")
        if self.only_test_classes and test is not train:
            train = train[torch.isin(train.targets, targets[1])]
            targets[0] = targets[0][torch.isin(targets[0], targets[1])]
        labels = [part.cpu() for part in targets]
        require_labels(self, LabelCounts.of_targets(*labels, leave_one_out=test is train))

        device = targets[0].device
        hits = torch.empty(len(self.k), len(labels[1]), dtype=torch.bool, device=device)
        for image, expected, similarity, neighbor in self._neighbors(train, test):
            classes, of_neighbor = targets[0][neighbor].unique(return_inverse=True)  # usually few
            for number, count in enumerate(self.k):
                votes = class_votes(
                    similarity[:, :count], of_neighbor[:, :count], len(classes), self.temperature
                )
                hits[number, image] = classes[votes.argmax(dim=1)] == expected
        names = [
            f"knn_top1_k{count}" if number else "knn_top1" for number, count in enumerate(self.k)
        ]
        results = [Figure.of_scores(scores) for scores in hits.cpu()]
        return dict(zip(names, results, strict=True))

    def _neighbors(
        self, train: Features | FileFeatures, test: Features | FileFeatures
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield images (B,), targets (B,), cosines (B, k) and row numbers (B, k), nearest first.

        Chunks of all ranks' test images are yielded, and k is the largest number of neighbors.
        Images and row numbers refer to the concatenated test and training sets of all ranks.
        """
        first_pass = torch.int8 if self.search == "int8" else torch.bfloat16
        bank = Bank(train.features, first_pass=first_pass)
        nearest = InChunks(lambda rows, out: bank.nearest(rows, max(self.k), out), "test images")
        excluded = torch.arange(len(test), device=test.targets.device)  # rows to exclude
        if test is not train:
            excluded = torch.full_like(excluded, -1)
        sizes = gather_objects((len(train), len(test)))
        first_row = sum(num_train for num_train, _ in sizes[: rank()])
        num_images = [num_test for _, num_test in sizes]
        images = torch.arange(sum(num_images)).split(num_images)  # of each rank
        rows = max(1, QUERIES // world_size())
        for start in range(0, max(num_images), rows):
            chunk = slice(start, start + rows)  # cloned: pickle copies the whole storage of a view
            queries = F.normalize(test.features[chunk], dim=1)
            parts = gather_objects((queries, test.targets[chunk].clone()))
            left_out = [torch.full_like(targets, -1) for _, targets in parts]
            left_out[rank()] = excluded[chunk]
            every = torch.cat([part for part, _ in parts])  # (B, E)
            cosine, row = nearest(every, torch.cat(left_out))
            blocks = gather_objects((cosine, row + first_row))
            cosine, row = (torch.cat(of_ranks, dim=1) for of_ranks in zip(*blocks, strict=True))
            cosine, order = cosine.topk(max(self.k), dim=1)
            image = torch.cat([numbers[chunk] for numbers in images])
            targets = torch.cat([part for _, part in parts])
            yield image, targets, cosine, row.gather(1, order)
