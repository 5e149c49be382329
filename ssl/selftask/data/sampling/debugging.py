"""Samplers for debugging."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from selftask.data.sampling.sampler import FlatOrder, Pool, Sampler
from selftask.errors import UserError
from selftask.random.permutation import EpochOrder, epoch_order
from selftask.registry import register_sampler


@register_sampler("sequential")
class Sequential(Sampler):
    """Every image once per epoch, unshuffled; for debugging, not for training."""

    def order(self, epoch: int) -> EpochOrder:
        return FlatOrder(lambda positions: positions)

    def describe(self) -> str:
        return "sequential, each image once, never shuffled"


@register_sampler("first")
class First(Sampler):
    """Only the first images, shuffled; to check that a run can overfit one batch."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        count: int | None = None
        """Number of images, at least ``train.batch_size``; null: one batch."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            batch_size = config["train"]["batch_size"]
            if self.count is not None and self.count < batch_size:
                yield (
                    f"count: {self.count} images fill no batch of train.batch_size={batch_size}; "
                    f"try train.batch_size={max(self.count, 1)}"
                )

    def __init__(self, config: Config, pool: Pool) -> None:
        super().__init__(config, pool)
        self.num_samples = pool.batch_size if config.count is None else config.count
        if self.num_samples > pool.num_images:
            raise UserError(
                f"data.sampler: the first {self.num_samples} images are more than the "
                f"{pool.num_images} there are"
            )

    def order(self, epoch: int) -> EpochOrder:
        return epoch_order(self.pool.seed, epoch, self.num_samples)

    def describe(self) -> str:
        return f"the first {self.num_samples:,} of {self.pool.num_images:,} images, each once"
