"""Samplers that look at labels: the same mix of classes in every batch, or another mix.

All of them see an epoch as one row of slots, class by class, in which each class has as many as it
is due; what fills them is a shuffled order of the class, again and again if it is short. So classes
come exactly as often as they should, and the images of a class equally often, give or take one.
They keep 8 bytes an image.
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
    """Slots for classes by their frequency to a power; subclasses say in which order."""

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
        """The images (int64) in these slots (P,) of an epoch."""
        classes = np.searchsorted(self._bounds, slots, side="right")
        sizes = self._sizes[classes]
        rounds, places = np.divmod(slots - (self._bounds - self._quotas)[classes], sizes)
        orders = SetOrders(hash_words(self.pool.seed, _IMAGES), epoch)
        chosen = orders.at(classes + rounds * len(self._sizes), sizes, places)
        images: np.ndarray = self._by_class[self._firsts[classes] + chosen]
        return images

    def _mix(self) -> str:
        """How many samples the rarest and the most frequent class have in an epoch."""
        least, most = self._quotas.min(), self._quotas.max()
        spread = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        return f"{len(self._sizes)} classes of {spread}"


@register_sampler("stratified")
class Stratified(_ByClass):
    """Every image once an epoch, and in every batch the classes in their proportions.

    Each class has as many places in a batch as its share is, up to one.
    """

    def __init__(self, config: None, pool: Pool) -> None:
        super().__init__(config, pool, power=1.0, num_samples=None)

    def order(self, epoch: int) -> EpochOrder:
        return _Strata(self, epoch)

    def describe(self) -> str:
        return f"stratified, each image once, {self._mix()}, alike in all batches"


@register_sampler("power_law")
class PowerLaw(_ByClass):
    """Classes by a power of their frequency: 1 as they are, 0.5 square roots, 0 all alike."""

    repeats = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        power: float = setting(0.5, min=-10, max=10)  # of the number of a class's images
        # of an epoch; none: as many as there are images
        samples: int | None = setting(None, min=1)

    def __init__(self, config: Config, pool: Pool) -> None:
        super().__init__(config, pool, power=config.power, num_samples=config.samples)

    def order(self, epoch: int) -> EpochOrder:
        return _Shuffle(self, epoch)

    def describe(self) -> str:
        return f"power_law, {self._mix()} by their frequency to the power {self.config.power:g}"


@register_sampler("balanced")
class Balanced(_ByClass):
    """All classes equally often: images of rare classes repeatedly, some of frequent ones not."""

    repeats = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        # of an epoch; none: as many as there are images
        samples: int | None = setting(None, min=1)

    def __init__(self, config: Config, pool: Pool) -> None:
        super().__init__(config, pool, power=0.0, num_samples=config.samples)

    def order(self, epoch: int) -> EpochOrder:
        return _Shuffle(self, epoch)

    def describe(self) -> str:
        return f"balanced, {self._mix()} samples"


class _Shuffle:
    """All slots of an epoch in shuffled order."""

    def __init__(self, sampler: _ByClass, epoch: int) -> None:
        self._sampler, self._epoch = sampler, epoch
        self._order = epoch_order(sampler.pool.seed, epoch, sampler.num_samples)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Indices (int64) at any positions of the epoch, in their shape."""
        slots = self._order.at(positions).ravel()
        return self._sampler.images(self._epoch, slots).reshape(positions.shape)


class _Strata:
    """Batch k has every S-th slot from the k-th on (S steps an epoch): its share of each class.

    Batches come in shuffled order, the slots within one too. The slots that fill no batch are left
    out evenly along the row, so of all classes, and others in each epoch: the row is turned.
    """

    def __init__(self, sampler: _ByClass, epoch: int) -> None:
        pool = sampler.pool
        self._sampler, self._epoch = sampler, epoch
        self._steps = sampler.num_samples // pool.batch_size
        self._batches = epoch_order(hash_words(pool.seed, _BATCHES), epoch, self._steps)
        self._places = SetOrders(hash_words(pool.seed, _PLACES), epoch)
        self._turn = hash_words(pool.seed, _BATCHES, epoch) % sampler.num_samples

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Indices (int64) at any positions of the epoch's full batches, in their shape."""
        size = self._sampler.pool.batch_size
        batches, places = np.divmod(positions.ravel(), size)
        places = self._places.at(batches, np.full_like(batches, size), places)
        numbers = self._batches.at(batches) + places * self._steps  # of those that are shown
        total = self._sampler.num_samples
        slots = numbers * total // (self._steps * size) + self._turn
        return self._sampler.images(self._epoch, slots % total).reshape(positions.shape)


def _complete_labels(pool: Pool) -> np.ndarray:
    """The labels, if every image has one."""
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
    """Whole numbers (int64) that add up to ``total``, each within one of its share of it."""
    exact = shares / shares.sum() * total
    whole = np.floor(exact).astype(np.int64)
    left = total - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:left]] += 1
    return whole
