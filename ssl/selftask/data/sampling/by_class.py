"""Samplers by class: the same proportions of classes in every batch, or other proportions.

An epoch is a row of slots, class by class, with the number of slots that each class should have.
They are filled with the images of the class in shuffled order, repeatedly if there are too few. So
the number of samples of each class is exact, and images of a class come equally often, within one.
The samplers keep 8 bytes per image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from selftask.config.fields import setting
from selftask.data.sampling.sampler import Pool, Sampler
from selftask.errors import UserError
from selftask.random.permutation import EpochOrder, SetOrders, epoch_order
from selftask.random.splitmix import hash_words
from selftask.registry import register_sampler

_BATCHES, _PLACES, _IMAGES = 1, 2, 3  # streams of one seed


class _ByClass(Sampler):
    """Slots for classes by their frequency to a power; subclasses define the order."""

    def __init__(self, config: Any, pool: Pool, *, power: float, num_samples: int | None) -> None:
        super().__init__(config, pool)
        self.num_samples = num_samples or pool.num_images
        labels = _complete_labels(pool)
        _, classes = np.unique(labels, return_inverse=True)
        self._by_class = np.argsort(classes, kind="stable")  # images, class by class
        self._sizes = np.bincount(classes)  # (C,) images of each class
        self._firsts = np.cumsum(self._sizes) - self._sizes  # (C,) of each class in _by_class
        shares = self._sizes.astype(np.float64) ** power
        self._quotas = _whole_numbers(shares, self.num_samples)  # (C,) slots of each class
        self._bounds = np.cumsum(self._quotas)

    def images(self, epoch: int, slots: np.ndarray) -> np.ndarray:
        """Return the images (int64) in slots (P,) of an epoch."""
        classes = np.searchsorted(self._bounds, slots, side="right")
        return self.images_of(epoch, classes, slots - (self._bounds - self._quotas)[classes])

    def images_of(self, epoch: int, classes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return images (int64) of classes (P,), numbered from 0 (P,) as they come in an epoch."""
        sizes = self._sizes[classes]
        rounds, places = np.divmod(numbers, sizes)
        orders = SetOrders(hash_words(self.pool.seed, _IMAGES), epoch)
        chosen = orders.at(classes + rounds * len(self._sizes), sizes, places)
        images: np.ndarray = self._by_class[self._firsts[classes] + chosen]
        return images

    def _mix(self) -> str:
        """Describe how many samples the rarest and the most frequent class have in an epoch."""
        least, most = self._quotas.min(), self._quotas.max()
        spread = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        return f"{len(self._sizes)} classes of {spread}"


@register_sampler("stratified")
class Stratified(_ByClass):
    """Every image once an epoch, with the proportions of classes kept in every batch.

    The number of samples of a class in a batch is its share, rounded up or down.
    """

    def __init__(self, config: None, pool: Pool) -> None:
        super().__init__(config, pool, power=1.0, num_samples=None)

    def order(self, epoch: int) -> EpochOrder:
        return _Strata(self, epoch)

    def describe(self) -> str:
        return f"stratified, each image once, {self._mix()}, the same in all batches"


@register_sampler("power_law")
class PowerLaw(_ByClass):
    """Classes by a power of their frequency: 1 unchanged, 0.5 square root, 0 all equal."""

    repeats = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        power: float = setting(0.5, min=-10, max=10)
        """Exponent of the number of a class's images: 1 is as they are, 0 is balanced."""
        samples: int | None = setting(None, min=1)
        """Samples of an epoch; null: as many as there are images."""

    def __init__(self, config: Config, pool: Pool) -> None:
        super().__init__(config, pool, power=config.power, num_samples=config.samples)

    def order(self, epoch: int) -> EpochOrder:
        return _Shuffle(self, epoch)

    def describe(self) -> str:
        return f"power_law, {self._mix()} by their frequency to the power {self.config.power:g}"


@register_sampler("balanced")
class Balanced(_ByClass):
    """All classes equally often: rare ones are repeated, frequent ones subsampled."""

    repeats = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        samples: int | None = setting(None, min=1)
        """Samples of an epoch; null: as many as there are images."""

    def __init__(self, config: Config, pool: Pool) -> None:
        super().__init__(config, pool, power=0.0, num_samples=config.samples)

    def order(self, epoch: int) -> EpochOrder:
        return _Shuffle(self, epoch)

    def describe(self) -> str:
        return f"balanced, {self._mix()} samples"


@register_sampler("few_classes")
class FewClasses(_ByClass):
    """Batches of a few classes with equally many images of each, for losses of pairs.

    The classes take turns in shuffled order. A batch is sorted by class, so that ranks have
    classes of their own if they divide ``classes_per_batch``.
    """

    repeats = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        classes_per_batch: int = setting(2, min=1)
        """Classes of a batch of all ranks, which this number has to divide."""
        samples: int | None = setting(None, min=1)
        """Samples of an epoch; null: as many as there are images."""

    def __init__(self, config: Config, pool: Pool) -> None:
        super().__init__(config, pool, power=0.0, num_samples=config.samples)
        given, known = config.classes_per_batch, len(self._sizes)
        if given > known:
            raise UserError(
                f"data.sampler.classes_per_batch={given}: there are {known} classes; at most that"
            )
        if pool.batch_size % given:
            raise UserError(
                f"data.sampler.classes_per_batch={given}: train.batch_size={pool.batch_size} "
                "cannot be divided into as many classes; choose a multiple of it"
            )
        self.num_classes = known

    def order(self, epoch: int) -> EpochOrder:
        return _FewClasses(self, epoch)

    def describe(self) -> str:
        given = self.config.classes_per_batch
        each = self.pool.batch_size // given
        return f"few_classes, {given} of {self.num_classes} classes a batch, {each} images of each"


class _FewClasses:
    """Batches in rounds through the classes, in an order of each round's own.

    The classes that fill no batch at the end of a round are left out, others in each round.
    """

    def __init__(self, sampler: FewClasses, epoch: int) -> None:
        self._sampler, self._epoch = sampler, epoch
        self._orders = SetOrders(hash_words(sampler.pool.seed, _BATCHES), epoch)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the indices (int64) at ``positions`` of full batches, of the same shape."""
        sampler, size = self._sampler, self._sampler.pool.batch_size
        num_classes, per_batch = sampler.num_classes, sampler.config.classes_per_batch
        batches, places = np.divmod(positions.ravel(), size)
        rounds, batches = np.divmod(batches, num_classes // per_batch)
        turns, numbers = np.divmod(places, size // per_batch)
        turns += batches * per_batch
        classes = self._orders.at(rounds, np.full_like(rounds, num_classes), turns)
        numbers += rounds * (size // per_batch)
        return sampler.images_of(self._epoch, classes, numbers).reshape(positions.shape)


class _Shuffle:
    """All slots of an epoch in shuffled order."""

    def __init__(self, sampler: _ByClass, epoch: int) -> None:
        self._sampler, self._epoch = sampler, epoch
        self._order = epoch_order(sampler.pool.seed, epoch, sampler.num_samples)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the indices (int64) at ``positions`` of the epoch, of the same shape."""
        slots = self._order.at(positions).ravel()
        return self._sampler.images(self._epoch, slots).reshape(positions.shape)


class _Strata:
    """Batch k has every S-th slot from the k-th on, with S steps an epoch.

    Batches are shuffled, and so are the slots within one. The slots that fill no batch are left out
    evenly along the row, so of all classes; the row is rotated, so that they differ by epoch.
    """

    def __init__(self, sampler: _ByClass, epoch: int) -> None:
        pool = sampler.pool
        self._sampler, self._epoch = sampler, epoch
        self._steps = sampler.num_samples // pool.batch_size
        self._batches = epoch_order(hash_words(pool.seed, _BATCHES), epoch, self._steps)
        self._places = SetOrders(hash_words(pool.seed, _PLACES), epoch)
        self._turn = hash_words(pool.seed, _BATCHES, epoch) % sampler.num_samples

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the indices (int64) at ``positions`` of full batches, of the same shape."""
        size = self._sampler.pool.batch_size
        batches, places = np.divmod(positions.ravel(), size)
        places = self._places.at(batches, np.full_like(batches, size), places)
        numbers = self._batches.at(batches) + places * self._steps  # of the slots that are used
        total = self._sampler.num_samples
        slots = numbers * total // (self._steps * size) + self._turn
        return self._sampler.images(self._epoch, slots % total).reshape(positions.shape)


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
    """Return integers that add up to ``total``, each within one of its share."""
    exact = shares / shares.sum() * total
    whole = np.floor(exact).astype(np.int64)
    left = total - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:left]] += 1
    return whole
