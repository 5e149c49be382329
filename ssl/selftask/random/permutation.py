"""Pseudo-random permutations that are computed position by position and never stored.

A Feistel network permutes the numbers below a power of two, for any round function. Cycle walking,
which applies the network again to results of n or more, gives a permutation of 0..n-1. Any position
in an order of 10**9 samples is thus computed directly, in any process, and resuming only needs a
count.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from selftask.random.splitmix import GOLDEN, hash_words, mix

ROUNDS = 8  # even, so that both halves end with their first width
MIN_BITS = 6  # narrower networks mix too little
BLOCK = 8192  # positions computed at once; epochs up to this are simply sorted


class EpochOrder(Protocol):
    """The sample indices of one epoch, by position."""

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the indices (int64) at ``positions`` (int64) of the epoch, of the same shape."""


def epoch_order(seed: int, epoch: int, n: int) -> SortedOrder | FeistelOrder:
    """Return a permutation of 0..n-1: sorted by hash if n is small, else a Feistel network.

    Args:
        seed: Seed of the run.
        epoch: Number of the epoch.
        n: Number of samples.
    """
    return (SortedOrder if n <= BLOCK else FeistelOrder)(seed, epoch, n)


class SortedOrder:
    """Permutation of 0..n-1 by sorting hashes, for small n; takes O(n log n) once."""

    def __init__(self, seed: int, epoch: int, n: int) -> None:
        self.n = n
        hashes = mix(np.arange(n, dtype=np.uint64) + np.uint64(hash_words(seed, epoch)))
        self._indices = np.argsort(hashes, kind="stable")

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the indices (int64) at ``positions`` below n, of the same shape."""
        return self._indices[positions]


class FeistelOrder:
    """Permutation of 0..n-1 that is computed position by position, in O(1) memory."""

    def __init__(self, seed: int, epoch: int, n: int) -> None:
        self.n = n
        self._network = _Network(seed, epoch, max(MIN_BITS, (n - 1).bit_length()))

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the indices (int64) at ``positions``, of the same shape; best for large arrays."""
        values = self._network.permute(positions.astype(np.uint64).ravel())
        (outside,) = np.nonzero(values >= self.n)
        while len(outside):  # cycle walking
            values[outside] = again = self._network.permute(values[outside])
            outside = outside[again >= self.n]
        return values.view(np.int64).reshape(positions.shape)


class SetOrders:
    """A permutation of 0..size-1 for each of many sets, such as classes or batches.

    The sizes may differ; a set's order depends on (seed, epoch), its number and its size.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._seed = (seed, epoch)

    def at(self, sets: np.ndarray, sizes: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the indices at ``positions`` of the given sets, int64 (P,).

        Args:
            sets: int64 (P,), number of the set.
            sizes: int64 (P,), size of the set.
            positions: int64 (P,), position within the set.
        """
        widths = np.maximum(MIN_BITS, np.frexp(sizes - 1.0)[1]).astype(np.uint64)
        tweaks = mix(sets.astype(np.uint64) + np.uint64(GOLDEN))
        bounds = sizes.astype(np.uint64)
        values = positions.astype(np.uint64)
        outside = np.arange(len(values))
        while len(outside):
            network = _Network(*self._seed, widths[outside], tweaks[outside])
            values[outside] = again = network.permute(values[outside])
            outside = outside[again >= bounds[outside]]
        return values.view(np.int64)


class _Network:
    """A Feistel network over the numbers below 2**bits; ``bits`` is a number or an array."""

    def __init__(self, seed: int, epoch: int, bits: Any, tweaks: Any = None) -> None:
        bits = np.uint64(bits) if isinstance(bits, int) else bits
        one, half = np.uint64(1), bits >> np.uint64(1)
        self._shift = bits - half  # the width of the right half, the wider one
        self._widths = (one << half) - one, (one << self._shift) - one  # masks: left, right
        keys = [np.uint64(hash_words(seed, epoch, number)) for number in range(ROUNDS)]
        self._keys = keys if tweaks is None else [key + tweaks for key in keys]

    def permute(self, values: np.ndarray) -> np.ndarray:
        """Apply all rounds; each round swaps the two halves, and thus their widths."""
        left, right = values >> self._shift, values & self._widths[1]
        for number, key in enumerate(self._keys):
            left, right = right, left ^ (mix(right + key) & self._widths[number % 2])
        return (left << self._shift) | right
