"""Repeated augmentation (Hoffer et al., Augment your batch, CVPR 2020)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from selftask.config.fields import setting
from selftask.data.sampling.sampler import FlatOrder, Pool, Sampler
from selftask.random.permutation import EpochOrder, epoch_order
from selftask.registry import register_sampler


@register_sampler("repeated")
class Repeated(Sampler):
    """Each image several times in its batch, each time with new augmentation parameters.

    The length of an epoch does not change, so an epoch has only a part of the images, and ``times``
    epochs together cover one shuffled order. The repeats of an image are as far apart in the batch
    as possible, so they are on different ranks if there are at least ``times`` ranks.
    """

    repeats = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        times: int = setting(3, min=1)
        """Number of times an image is in its batch; must divide ``train.batch_size``."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            batch_size = config["train"]["batch_size"]
            if batch_size % self.times:
                near = max(batch_size // self.times, 1) * self.times
                yield (
                    f"times: {self.times} does not divide train.batch_size={batch_size}; "
                    f"try train.batch_size={near}"
                )

    def __init__(self, config: Config, pool: Pool) -> None:
        super().__init__(config, pool)
        num_full = pool.num_images // pool.batch_size * pool.batch_size
        self.num_samples = num_full or pool.num_images  # too few images: steps_per_epoch raises

    def order(self, epoch: int) -> EpochOrder:
        pool, times = self.pool, self.config.times
        num_images = pool.batch_size // times  # different images per batch
        first = epoch % times * (pool.num_images // pool.batch_size)
        order = epoch_order(pool.seed, epoch // times, pool.num_images)

        def at(positions: np.ndarray) -> np.ndarray:
            batches, slots = np.divmod(positions, pool.batch_size)
            return order.at((first + batches) * num_images + slots % num_images)

        return FlatOrder(at)

    def describe(self) -> str:
        return f"repeated, each image {self.config.times} times in its batch"
