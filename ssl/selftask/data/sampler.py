"""Which sample comes when: a pure function of (seed, epoch), sought in O(1) time and memory.

The order of a large epoch is a pseudo-random permutation computed position by position (a Feistel
network with cycle walking), so nothing is stored or replayed: resuming at step k means counting
from k.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from selftask.errors import ConfigError

ROUNDS = 8  # even, so that both halves end with the width they began with
MIN_BITS = 6  # narrower networks mix too little
BLOCK = 8192  # positions computed at once; epochs up to this are simply sorted
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


class EpochOrder(Protocol):
    """The shuffled indices 0..n-1 of one epoch."""

    n: int

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Indices (int64) at any positions below n, in their shape."""


def epoch_order(seed: int, epoch: int, n: int) -> EpochOrder:
    """The order of an epoch: sorted by hash where that is cheap, a Feistel network beyond."""
    return (SortedOrder if n <= BLOCK else FeistelOrder)(seed, epoch, n)


class SortedOrder:
    """0..n-1 sorted by their hashes: O(n log n) once, for small n."""

    def __init__(self, seed: int, epoch: int, n: int) -> None:
        self.n = n
        hashes = _mix(np.arange(n, dtype=np.uint64) + np.uint64(hash_words(seed, epoch)))
        self._indices = np.argsort(hashes, kind="stable")

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Indices (int64) at any positions below n, in their shape."""
        return self._indices[positions]


class FeistelOrder:
    """0..n-1 permuted position by position: O(1) memory, and time only for what is asked.

    A Feistel network permutes the numbers below a power of two; results beyond n are put through
    it again until they fall below n, which again is a permutation, of 0..n-1.
    """

    def __init__(self, seed: int, epoch: int, n: int) -> None:
        self.n = n
        bits = max(MIN_BITS, (n - 1).bit_length())
        self._right_bits = bits - bits // 2
        self._widths = ((1 << bits // 2) - 1, (1 << self._right_bits) - 1)  # masks: left, right
        self._keys = [hash_words(seed, epoch, number) for number in range(ROUNDS)]

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Indices (int64) at any positions below n, in their shape; cheapest by the thousand."""
        values = self._permute(positions.astype(np.uint64).ravel())
        (outside,) = np.nonzero(values >= self.n)
        while len(outside):
            values[outside] = again = self._permute(values[outside])
            outside = outside[again >= self.n]
        return values.view(np.int64).reshape(positions.shape)

    def _permute(self, values: np.ndarray) -> np.ndarray:
        """One pass through the network; the halves swap, and so do their widths."""
        shift = np.uint64(self._right_bits)
        left, right = values >> shift, values & np.uint64(self._widths[1])
        for number, key in enumerate(self._keys):
            width = np.uint64(self._widths[number % 2])
            left, right = right, left ^ (_mix(right + np.uint64(key)) & width)
        permuted: np.ndarray = (left << shift) | right
        return permuted


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
        batches_at_once = max(1, BLOCK // self.batch_size_per_rank)
        own = self.rank * self.batch_size_per_rank + np.arange(self.batch_size_per_rank)
        while True:
            order = epoch_order(self.seed, epoch, self.n)
            while batch < self.steps_per_epoch:
                stop = min(batch + batches_at_once, self.steps_per_epoch)
                firsts = np.arange(batch, stop) * self.batch_size
                for indices in order.at(firsts[:, None] + own).tolist():
                    yield [(epoch, index) for index in indices]
                batch = stop
            epoch, batch = epoch + 1, 0


def steps_per_epoch(n: int, batch_size: int) -> int:
    """Number of full global batches in n samples; raises ConfigError if there is none."""
    if batch_size > n:
        problem = (
            f"train.batch_size: {batch_size} is more than the {n} images there are, so an epoch "
            f"would have no step; at most {n} is possible"
        )
        raise ConfigError([problem])
    return n // batch_size


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer, modulo 2**64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed
