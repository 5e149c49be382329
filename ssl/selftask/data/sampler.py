"""Which sample comes when: a pure function of (seed, epoch), sought in O(1) time and memory.

The order of an epoch is a pseudo-random permutation computed position by position (a Feistel
network with cycle walking), so nothing is stored or replayed: resuming at step k means counting
from k.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from selftask.errors import ConfigError

ROUNDS = 8
_MASK = (1 << 64) - 1


def hash_words(*words: int) -> int:
    """64 well-mixed bits of some integers (splitmix64, one round a word)."""
    state = 0
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


class EpochOrder:
    """The shuffled indices 0..n-1 of one epoch; ``order[a:b]`` costs O(b - a), whatever n is.

    A Feistel network permutes the numbers below a power of four; results beyond n are put
    through it again until they fall below n, which again is a permutation, of 0..n-1.
    """

    def __init__(self, seed: int, epoch: int, n: int) -> None:
        if n < 1:
            raise ValueError(f"an order of {n} samples")
        self.n = n
        self._half = np.uint64(max(2, ((n - 1).bit_length() + 1) // 2))
        self._low = np.uint64((1 << int(self._half)) - 1)
        self._keys = [np.uint64(hash_words(seed, epoch, round)) for round in range(ROUNDS)]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, positions: slice) -> np.ndarray:
        """Indices at consecutive positions, int64."""
        start, stop, step = positions.indices(self.n)
        values = self._permute(np.arange(start, stop, step, dtype=np.uint64))
        while (outside := values >= self.n).any():
            values[outside] = self._permute(values[outside])
        return values.astype(np.int64)

    def _permute(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._low
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._low)
        return (left << self._half) | right


class SequentialOrder:
    """The indices 0..n-1 as they are, for evaluation; the same interface as EpochOrder."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, positions: slice) -> np.ndarray:
        return np.arange(*positions.indices(self.n), dtype=np.int64)


class BatchSampler:
    """This rank's part of every global batch, from step ``start`` on, without an end.

    Global batch k of an epoch is ``order[k * B : (k + 1) * B]``, and rank r of W has its r-th
    contiguous part of B / W. The last partial batch of an epoch is dropped. Yields lists of
    (epoch, index).
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
    ) -> None:
        if batch_size % world_size:
            raise ConfigError(
                [f"train.batch_size: {batch_size} cannot be divided among {world_size} processes"]
            )
        self.n = n
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.batch_size_per_rank = batch_size // world_size
        self.steps_per_epoch = steps_per_epoch(n, batch_size)
        self.start = start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, batch = divmod(self.start, self.steps_per_epoch)
        while True:
            order = EpochOrder(self.seed, epoch, self.n)
            for k in range(batch, self.steps_per_epoch):
                first = k * self.batch_size + self.rank * self.batch_size_per_rank
                indices = order[first : first + self.batch_size_per_rank].tolist()
                yield [(epoch, index) for index in indices]
            epoch, batch = epoch + 1, 0


def steps_per_epoch(n: int, batch_size: int) -> int:
    """Number of full global batches in n samples; raises ConfigError if there is none."""
    if batch_size > n:
        raise ConfigError(
            [
                f"train.batch_size: {batch_size} is more than the {n} images there are, so an "
                f"epoch would have no step; at most {n} is possible"
            ]
        )
    return n // batch_size


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer, modulo 2**64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed
