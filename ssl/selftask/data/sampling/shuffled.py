"""The default sampler: every image once per epoch."""

from __future__ import annotations

from selftask.data.sampling.sampler import Sampler
from selftask.random.permutation import EpochOrder, epoch_order
from selftask.registry import register_sampler


@register_sampler("shuffled")
class Shuffled(Sampler):
    """Every image once per epoch, in a new order each time (default)."""

    def order(self, epoch: int) -> EpochOrder:
        return epoch_order(self.pool.seed, epoch, self.num_samples)

    def describe(self) -> str:
        return "shuffled, each image once"
