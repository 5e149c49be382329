"""Label counts of an evaluation, which are checked before features are computed.

C classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Generator, Tensor

from selftask.config.checks.requirements import label_free
from selftask.config.fields import setting
from selftask.config.schema import Component
from selftask.data.labels import split_problems
from selftask.data.loading.open_data import Sources
from selftask.errors import ConfigError, UserError, plural
from selftask.evaluate.features import Features
from selftask.registry import EVALUATIONS

_MAX_NAMES = 10


@dataclass(frozen=True)
class LabelCounts:
    """Number of images of each class in the training set and the test set of an evaluation."""

    train: np.ndarray  # (C,)
    test: np.ndarray  # (C,)
    names: Sequence[str] | None = None  # class names; None: numbers
    leave_one_out: bool = False  # each image is compared with all others
    unlabeled: tuple[int, int] = (0, 0)  # images of either set without a label
    only_test_classes: bool = False  # only classes with test images are predicted

    @classmethod
    def of_sources(cls, sources: Sources) -> LabelCounts | None:
        """Count labels without reading images; None if labels are only known after reading."""
        train, val = sources.train, sources.val
        test = train if val is None else val
        if getattr(train, "labels", None) is None or getattr(test, "labels", None) is None:
            return None
        names = train.class_names() if hasattr(train, "class_names") else None
        return cls.of_targets(train.labels, test.labels, names=names, leave_one_out=val is None)

    @classmethod
    def of_targets(
        cls,
        train: Tensor | np.ndarray,
        test: Tensor | np.ndarray,
        *,
        names: Sequence[str] | None = None,
        leave_one_out: bool = False,
        only_test_classes: bool = False,
    ) -> LabelCounts:
        """Count the targets of both sets.

        Args:
            train: Targets (N,) of the training set; -1 means no label.
            test: Targets (M,) of the test set.
            names: Names of the classes; None for numbers.
            leave_one_out: Whether each image is compared with all other images of one set.
            only_test_classes: Whether only classes with test images are predicted.
        """
        labels = [np.asarray(part)[np.asarray(part) >= 0] for part in (train, test)]
        unlabeled = len(train) - len(labels[0]), len(test) - len(labels[1])
        size = 1 + max(int(part.max(initial=-1)) for part in labels)
        counts = [np.bincount(part, minlength=size) for part in labels]
        return cls(counts[0], counts[1], names, leave_one_out, unlabeled, only_test_classes)

    @property
    def classes(self) -> np.ndarray:
        """Labels of the classes with at least one training image."""
        return np.flatnonzero(self.train)

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess among the classes that may be predicted."""
        classes = (self.among_test_classes() if self.only_test_classes else self).classes
        share = self.test[classes].sum() / max(1, self.test.sum())
        return float(share / max(1, len(classes)))

    @property
    def num_neighbors(self) -> int:
        """Number of training images to which a test image is compared."""
        return int(self.train.sum()) - self.leave_one_out

    def among_test_classes(self) -> LabelCounts:
        """Return the counts without training images of classes that are not in the test set."""
        return replace(self, train=np.where(self.test > 0, self.train, 0))

    def name(self, label: int) -> str:
        """Return the name of a class in quotes, or its number."""
        return repr(self.names[label]) if self.names else str(label)

    def describe(self) -> str:
        """Return one line: images, classes, chance, and share of the most frequent test class."""
        num_train, num_test = self.train.sum(), self.test.sum()
        sets = f"{num_train} training and {num_test} test images"
        if self.leave_one_out:
            sets = f"{num_train} images, each tested against the others"
        shown = ", ".join(self.name(label) for label in self.classes[:_MAX_NAMES])
        more = ", ..." if len(self.classes) > _MAX_NAMES else ""
        frequent = self.test.max(initial=0) / max(1, num_test)
        return (
            f"{sets}; {len(self.classes)} classes ({shown}{more}); chance {self.chance:.4g}, "
            f"most frequent class {frequent:.4g}"
        )

    def facts(self) -> dict[str, float]:
        """Return the numbers of images and classes, and the chance accuracy, as metrics by name."""
        return {
            "train_images": int(self.train.sum()),
            "test_images": int(self.test.sum()),
            "classes": len(self.classes),
            "chance": self.chance,
        }


def check_label_counts(evaluations: Mapping[str, Component], counts: LabelCounts) -> None:
    """Raise ConfigError unless the labels are meaningful and sufficient for every evaluation."""
    problems = list(split_problems(counts.names))
    if learning := evaluations.keys() - label_free(evaluations).keys():
        sets = zip(("training", "test"), counts.unlabeled, (counts.train, counts.test), strict=True)
        problems += [
            f"{missing} of {missing + labeled.sum()} {images} images have no label, and "
            f"{', '.join(sorted(learning))} needs one for each image; without evaluations during "
            "training: eval.evaluations.NAME=null"
            for images, missing, labeled in sets
            if missing and labeled.any()
        ]
    for key, component in evaluations.items():
        evaluation = EVALUATIONS[component.name](**component.args)
        if hasattr(evaluation, "label_problems"):
            problems += [f"eval.evaluations.{key}.{p}" for p in evaluation.label_problems(counts)]
    if problems:
        raise ConfigError(problems)


@dataclass(frozen=True, kw_only=True)
class FewLabels:
    """Base class of evaluations that train classifiers on all labels and on subsets of them."""

    few_labels: list[int] = setting([], min=1)
    """Also train on this many labels per class; each number has its own metrics."""
    few_shares: list[float] = setting([], above=0, max=1)
    """Also train on these shares of the labels of each class, such as 0.01 and 0.1."""
    repeats: int = setting(5, min=1)
    """Number of random subsets of the labels, over which results are averaged."""
    only_test_classes: bool = False
    """Whether predicted classes are restricted to those of the test set."""
    seed: int = setting(0, min=0)
    """Seed of the random draws."""
    seeds: int = setting(1, min=1)
    """Number of seeds, from ``seed`` on, over which metrics are averaged."""

    def label_problems(self, counts: LabelCounts) -> Iterator[str]:
        """Yield a problem if a class has fewer training images than an entry of ``few_labels``."""
        if not len(counts.classes):
            return
        rarest = min(counts.classes, key=lambda label: counts.train[label])
        least = counts.train[rarest]
        too_many = [count for count in self.few_labels if count > least]
        if too_many:
            yield (
                f"few_labels: {too_many}: class {counts.name(rarest)} has {least} training "
                f"{plural('image', least)}; use at most {least}"
            )

    def check(self, train: Features, test: Features, name: str) -> None:
        """Raise UserError unless both sets have labels, and enough of them."""
        train.check_labels(f"{name}, training set")
        test.check_labels(f"{name}, test set")
        require_labels(self, LabelCounts.of_targets(train.targets.cpu(), test.targets.cpu()))

    def draws(self, train: Features, generator: Generator) -> Iterator[tuple[str, list[Features]]]:
        """Yield part of a metric's name, such as ``_10_labels``, and the training subsets for it.

        The first subset is all images, with an empty name. A share of 0.01 is named ``_1_percent``.
        """
        yield "", [train]
        for count in self.few_labels:
            yield f"_{count}_labels", [train.draw(count, generator) for _ in range(self.repeats)]
        for share in self.few_shares:
            draws = [train.draw_share(share, generator) for _ in range(self.repeats)]
            yield f"_{100 * share:g}_percent", draws


def require_labels(evaluation: Any, counts: LabelCounts) -> None:
    """Raise UserError unless the labels are sufficient for this evaluation."""
    problems = list(evaluation.label_problems(counts))
    if problems:
        raise UserError("\n".join(problems))


def count_shared_images(train: Features, test: Features) -> int:
    """Return the number of test images whose features equal those of a training image.

    Features are equal if all their bits are. Returns 0 if at most half of the training images have
    distinct features (a collapsed network).
    """
    draw = np.random.default_rng(0)
    factors = draw.integers(1, 2**62, size=train.features.shape[1], dtype=np.int64) | 1
    seen, tested = (_hash_rows(part, factors) for part in (train, test))
    if 2 * len(np.unique(seen)) <= len(seen):
        return 0
    return int(np.isin(tested, seen).sum())


def _hash_rows(part: Features, factors: np.ndarray) -> np.ndarray:
    """Return a hash of each row, int64 (N,): a sum modulo 2^64, exact in any order of summation."""
    bits = part.features.cpu().contiguous().numpy().view(np.int32)  # (N, E)
    hashes = np.empty(len(bits), dtype=np.int64)
    for first in range(0, len(bits), 4096):
        rows = slice(first, first + 4096)
        hashes[rows] = (bits[rows].astype(np.int64) * factors).sum(axis=1)
    return hashes
