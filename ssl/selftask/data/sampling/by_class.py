"""Samplers by class: the same class proportions in every batch, or other class frequencies.

An epoch is a list of slots sorted by class; each class has a fixed number of slots. They are filled
with the images of the class in shuffled order, several times if there are too few images. The
number of samples per class is therefore exact, and the frequencies of the images of a class differ
by at most one. Only ``few_classes`` has no slots: it iterates over the classes in rounds. The
samplers keep 8 bytes per image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from selftask.config.fields import setting
from selftask.data.sampling.sampler import FlatOrder, Pool, Sampler
from selftask.errors import UserError
from selftask.random.permutation import EpochOrder, SetOrders, epoch_order
from selftask.random.splitmix import hash_words
from selftask.registry import register_sampler

_BATCHES, _PLACES, _IMAGES = 1, 2, 3  # random streams of one seed


class _ByClass(Sampler):
    """Base class of samplers whose slots per class are proportional to frequency ** power.

    Creating one raises UserError if an image has no label.
    """

    def __init__(self, config: Any, pool: Pool, *, power: float, num_samples: int | None) -> None:
        super().__init__(config, pool)
        self.num_samples = num_samples or pool.num_images
        labels = _complete_labels(pool)
        _, classes = np.unique(labels, return_inverse=True)
        self._by_class = np.argsort(classes, kind="stable")  # images, class by class
        self._sizes = np.bincount(classes)  # (C,) images of each class
        self._firsts = np.cumsum(self._sizes) - self._sizes  # (C,) starts in _by_class
        shares = self._sizes.astype(np.float64) ** power
        self._quotas = _whole_numbers(shares, self.num_samples)  # (C,) slots of each class
        self._bounds = np.cumsum(self._quotas)

    def images(self, epoch: int, slots: np.ndarray) -> np.ndarray:
        """Return the indices of the images in slots (P,) of an epoch, int64 (P,)."""
        classes = np.searchsorted(self._bounds, slots, side="right")
        return self.images_of(epoch, classes, slots - (self._bounds - self._quotas)[classes])

    def images_of(self, epoch: int, classes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return the indices of the images of samples, int64 (P,).

        Args:
            epoch: Epoch of the samples.
            classes: Class of each sample, (P,).
            numbers: Number of each sample among those of its class in the epoch, from 0, (P,).
        """
        sizes = self._sizes[classes]
        rounds, slots_in_batch = np.divmod(numbers, sizes)
        orders = SetOrders(hash_words(self.pool.seed, _IMAGES), epoch)
        chosen = orders.at(classes + rounds * len(self._sizes), sizes, slots_in_batch)
        return self._by_class[self._firsts[classes] + chosen]

    def order(self, epoch: int) -> EpochOrder:
        """Return the shuffled order of all samples of an epoch."""
        order = epoch_order(self.pool.seed, epoch, self.num_samples)
        return FlatOrder(lambda positions: self.images(epoch, order.at(positions)))

    def _mix(self) -> str:
        """Return the number of classes, and the fewest and most slots of a class in an epoch."""
        least, most = self._quotas.min(), self._quotas.max()
        spread = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        return f"{len(self._sizes)} classes of {spread}"


@register_sampler("stratified")
class Stratified(_ByClass):
    """Every image once per epoch, with the class proportions of the data in every batch.

    The number of samples of a class in a batch is its share, rounded up or down.
    """

    def __init__(self, config: None, pool: Pool) -> None:
        super().__init__(config, pool, power=1.0, num_samples=None)

    def order(self, epoch: int) -> EpochOrder:
        """Return an order of S batches, in which batch k has the slots k, k + S, k + 2 S, ...

        The batches are shuffled, and so are the slots within a batch. If the number of slots is not
        a multiple of the batch size, evenly spaced slots are omitted, so that all classes lose the
        same share. Counting starts at another slot in each epoch, so that others are omitted.
        """
        pool, total = self.pool, self.num_samples
        size, steps = pool.batch_size, total // pool.batch_size
        batch_order = epoch_order(hash_words(pool.seed, _BATCHES), epoch, steps)
        slot_orders = SetOrders(hash_words(pool.seed, _PLACES), epoch)
        turn = hash_words(pool.seed, _BATCHES, epoch) % total

        def at(positions: np.ndarray) -> np.ndarray:
            batches, slots = np.divmod(positions, size)
            slots = slot_orders.at(batches, np.full_like(batches, size), slots)
            slots_kept = batch_order.at(batches) + slots * steps
            return self.images(epoch, (slots_kept * total // (steps * size) + turn) % total)

        return FlatOrder(at)

    def describe(self) -> str:
        return f"stratified, each image once, {self._mix()}, the same in all batches"


@register_sampler("power_law")
class PowerLaw(_ByClass):
    """Class frequencies raised to a power: 1 keeps them, 0.5 is the square root, 0 equalizes."""

    repeats = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        power: float = setting(0.5, min=-10, max=10)
        """Exponent of each class's number of images: 1 keeps the proportions, 0 is balanced."""
        samples: int | None = setting(None, min=1)
        """Number of samples per epoch; null: the number of images."""

    def __init__(self, config: Config, pool: Pool) -> None:
        super().__init__(config, pool, power=config.power, num_samples=config.samples)

    def describe(self) -> str:
        return f"power_law, {self._mix()} by their frequency to the power {self.config.power:g}"


@register_sampler("balanced")
class Balanced(_ByClass):
    """All classes equally often: rare ones are repeated, frequent ones subsampled."""

    repeats = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        samples: int | None = setting(None, min=1)
        """Number of samples per epoch; null: the number of images."""

    def __init__(self, config: Config, pool: Pool) -> None:
        super().__init__(config, pool, power=0.0, num_samples=config.samples)

    def describe(self) -> str:
        return f"balanced, {self._mix()} samples"


@register_sampler("few_classes")
class FewClasses(_ByClass):
    """Batches of a few classes with equally many images of each, for pair-based losses.

    The classes take turns in shuffled order. The samples of a class are adjacent in the batch. No
    class is therefore shared between ranks if the number of ranks divides ``classes_per_batch``.
    """

    repeats = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        classes_per_batch: int = setting(2, min=1)
        """Number of classes in a global batch; must divide ``train.batch_size`` and be at most the
        number of classes."""
        samples: int | None = setting(None, min=1)
        """Number of samples per epoch; null: the number of images."""

    def __init__(self, config: Config, pool: Pool) -> None:
        super().__init__(config, pool, power=0.0, num_samples=config.samples)
        per_batch, num_classes = config.classes_per_batch, len(self._sizes)
        if per_batch > num_classes:
            raise UserError(
                f"data.sampler.classes_per_batch={per_batch}: must be at most {num_classes}, the "
                "number of classes"
            )
        if pool.batch_size % per_batch:
            raise UserError(
                f"data.sampler.classes_per_batch={per_batch}: train.batch_size={pool.batch_size} "
                "cannot be divided into as many classes; choose a multiple of it"
            )
        self.num_classes = num_classes

    def order(self, epoch: int) -> EpochOrder:
        """Return an order that iterates over the classes in rounds, each in a new random order.

        If the last classes of a round are too few for a batch, this round omits them.
        """
        per_batch, size = self.config.classes_per_batch, self.pool.batch_size
        orders = SetOrders(hash_words(self.pool.seed, _BATCHES), epoch)

        def at(positions: np.ndarray) -> np.ndarray:
            batches, slots = np.divmod(positions, size)
            rounds, batches = np.divmod(batches, self.num_classes // per_batch)
            turns, numbers = np.divmod(slots, size // per_batch)
            turns += batches * per_batch
            classes = orders.at(rounds, np.full_like(rounds, self.num_classes), turns)
            return self.images_of(epoch, classes, numbers + rounds * (size // per_batch))

        return FlatOrder(at)

    def describe(self) -> str:
        per_batch = self.config.classes_per_batch
        each = self.pool.batch_size // per_batch
        return (
            f"few_classes, {per_batch} of {self.num_classes} classes a batch, {each} images of each"
        )


def _complete_labels(pool: Pool) -> np.ndarray:
    """Return the labels; raises UserError if an image has none."""
    if pool.labels is None:
        raise UserError(
            "data.sampler: a sampler by class needs labels, and these images have none; "
            "data.sampler=shuffled needs none"
        )
    missing = int((pool.labels < 0).sum())
    if missing:
        raise UserError(
            f"data.sampler: a sampler by class needs labels, and {missing:,} of "
            f"{pool.num_images:,} images have none (the first is number "
            f"{int(np.argmax(pool.labels < 0))}); data.sampler=shuffled needs none"
        )
    return pool.labels


def _whole_numbers(shares: np.ndarray, total: int) -> np.ndarray:
    """Return integers proportional to ``shares``, rounded so that they add up to ``total``."""
    exact = shares / shares.sum() * total
    numbers = np.floor(exact).astype(np.int64)
    remaining = total - int(numbers.sum())
    numbers[np.argsort(numbers - exact, kind="stable")[:remaining]] += 1
    return numbers
