"""Sample order: a pure function of (seed, epoch, position), so that seeks take O(1) time.

A sampler defines the images of an epoch and their order. The batch sampler cuts that order into
this rank's parts of the global batches. Neither has state: a run that resumes at batch k counts
from k on, and the samples of a global batch are the same for any number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from selftask.config.extensions.user_code import source_of
from selftask.config.schema import Config
from selftask.data.source import Source
from selftask.errors import ConfigError, UserError
from selftask.random.permutation import BLOCK, EpochOrder
from selftask.registry import SAMPLERS

_EPOCHS = 1 << 32  # a key's first number is epoch + repeat * _EPOCHS,
_REPEATS = 1 << 31  # with fewer repeats than this; together 63 bits


@dataclass(frozen=True)
class Pool:
    """The images that a sampler draws from, the batch size, and the seed of the run."""

    num_images: int
    batch_size: int  # of all ranks together
    seed: int
    labels: np.ndarray | None = None  # (num_images,) int64, -1: no label; None: no labels at all


@dataclass(frozen=True)
class FlatOrder:
    """Order of an epoch, defined by a function that maps positions (P,) to indices (P,)."""

    function: Callable[[np.ndarray], np.ndarray]

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the indices (int64) at ``positions`` of the epoch, of the same shape."""
        return self.function(positions.ravel()).reshape(positions.shape)


class Sampler(ABC):
    """Base class of samplers: the images of an epoch and their order, the same on every rank.

    Samplers do not import torch. Registered classes take their ``Config`` (None if they have none)
    and the pool, and raise UserError for errors that the user must fix. ``num_samples`` is the
    length of an epoch. ``repeats`` is True if an image may come several times in an epoch; its
    augmentation parameters then differ each time.
    """

    repeats = False

    def __init__(self, config: Any, pool: Pool) -> None:
        self.config = config
        self.pool = pool
        self.num_samples = pool.num_images

    @abstractmethod
    def order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch; for large data sets, this must take O(1) time."""

    @abstractmethod
    def describe(self) -> str:
        """Describe the samples of an epoch, such as ``shuffled, each image once``."""


def build_sampler(config: Config, source: Source) -> Sampler:
    """Build the sampler of ``data.sampler``.

    Raises:
        UserError: If the sampler does not suit the images, or its class is incomplete.
        ConfigError: If an epoch has no full batch.
    """
    chosen = config.data.sampler
    registered = SAMPLERS[chosen.name]
    subject = f"{source_of(registered)}: the sampler {registered.__name__}"
    if not (isinstance(registered, type) and issubclass(registered, Sampler)):
        raise UserError(f"{subject} must extend {Sampler.__module__}.Sampler")
    if registered.__abstractmethods__:
        missing = ", ".join(sorted(registered.__abstractmethods__))
        raise UserError(f"{subject} has no method {missing}")
    config_class = getattr(registered, "Config", None)
    train = config.train
    labels = None if source.labels is None else np.asarray(source.labels)
    pool = Pool(len(source), train.batch_size, train.seed, labels)
    sampler: Sampler = registered(config_class(**chosen.args) if config_class else None, pool)
    if not hasattr(sampler, "pool"):
        raise UserError(f"{subject}: __init__ must call super().__init__(config, pool)")
    steps_per_epoch(sampler.num_samples, pool.batch_size)  # raises if there is none
    return sampler


class BatchSampler:
    """Endless iterable of this rank's part of every global batch, from number ``start`` on.

    Global batch k of an epoch is ``order[k * B : (k + 1) * B]``, and rank r of W has its r-th
    contiguous part, of B / W samples. The last partial batch of an epoch is dropped. A part is a
    list of keys (epoch, index). If the sampler repeats images, the number of the repeat is combined
    with the epoch; ``epoch_of`` extracts the epoch.

    Raises:
        ConfigError: If the batch size is not a multiple of ``world_size``, or an epoch has no full
            batch.
    """

    def __init__(
        self, sampler: Sampler, *, rank: int = 0, world_size: int = 1, start: int = 0
    ) -> None:
        self.sampler = sampler
        self.batch_size = sampler.pool.batch_size
        if self.batch_size % world_size:
            text = f"{self.batch_size} cannot be divided among {world_size} processes"
            raise ConfigError([f"train.batch_size: {text}"])
        self.rank = rank
        self.batch_size_per_rank = self.batch_size // world_size
        self.steps_per_epoch = steps_per_epoch(sampler.num_samples, self.batch_size)
        self.start = start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, batch = divmod(self.start, self.steps_per_epoch)
        batches_at_once = max(1, BLOCK // self.batch_size_per_rank)
        offsets = self.rank * self.batch_size_per_rank + np.arange(self.batch_size_per_rank)
        while True:
            order = self.sampler.order(epoch)
            while batch < self.steps_per_epoch:
                stop = min(batch + batches_at_once, self.steps_per_epoch)
                positions = np.arange(batch, stop)[:, None] * self.batch_size + offsets
                yield from self._keys(epoch, positions, self._indices(order, positions))
                batch = stop
            epoch, batch = epoch + 1, 0

    def _indices(self, order: EpochOrder, positions: np.ndarray) -> np.ndarray:
        """Return the indices at some positions; raise UserError unless they are those of images."""
        wrong = None
        if not hasattr(order, "at"):
            wrong = (
                f"a {type(order).__name__}, not an object with a method at(positions), such as "
                "FlatOrder(indices.__getitem__)"
            )
        else:
            indices, count = order.at(positions), self.sampler.pool.num_images
            for index in (indices.min(), indices.max()):
                if not 0 <= index < count:
                    wrong = f"index {index}; the images are 0 to {count - 1}"
        if wrong is not None:
            raise UserError(f"{source_of(self.sampler.order)}: a sampler's order returned {wrong}")
        return indices

    def _keys(
        self, epoch: int, positions: np.ndarray, indices: np.ndarray
    ) -> Iterator[list[tuple[int, int]]]:
        """Yield the keys of K batches, whose positions and indices are (K, B / W)."""
        repeats = positions + 1 if self.sampler.repeats else np.zeros_like(positions)
        epochs = epoch + repeats % _REPEATS * _EPOCHS  # each repeat has its own draws
        for batch_epochs, batch in zip(epochs.tolist(), indices.tolist(), strict=True):
            yield [*zip(batch_epochs, batch, strict=True)]

    def describe(self) -> str:
        """Describe the length of an epoch, in one line for the log."""
        batches, length = self.steps_per_epoch, self.sampler.num_samples
        shown = batches * self.batch_size
        rest = f", {length - shown:,} left over" if length > shown else ""
        return (
            f"{self.sampler.describe()}; an epoch is {batches:,} "
            f"{'batch' if batches == 1 else 'batches'} of "
            f"{self.batch_size:,} = {shown:,} samples{rest}"
        )


def epoch_of(key: int) -> int:
    """Return the epoch that is encoded in the first number of a sample's key."""
    return key % _EPOCHS


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Return the number of full global batches in an epoch; raises ConfigError if it is 0."""
    if batch_size > num_samples:
        problem = (
            f"train.batch_size: {batch_size} is more than the {num_samples} images there are, so "
            f"an epoch would have no step; at most {num_samples} is possible"
        )
        raise ConfigError([problem])
    return num_samples // batch_size
