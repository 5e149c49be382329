"""Pseudo-random permutations that are computed position by position: nothing is stored.

A Feistel network permutes the numbers below a power of two whatever its round function is; cycle
walking (results beyond n go through again) makes that a permutation of 0..n-1. So any position of
an order of 10**9 samples is known at once, in any process, and resuming means counting.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

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
    """The indices that one epoch shows, by position."""

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Indices (int64) at any positions (int64) of the epoch, in their shape."""


def epoch_order(seed: int, epoch: int, n: int) -> SortedOrder | FeistelOrder:
    """0..n-1 shuffled: sorted by hash where that is cheap, a Feistel network beyond."""
    return (SortedOrder if n <= BLOCK else FeistelOrder)(seed, epoch, n)


class SortedOrder:
    """0..n-1 sorted by their hashes: O(n log n) once, for small n."""

    def __init__(self, seed: int, epoch: int, n: int) -> None:
        self.n = n
        hashes = mix(np.arange(n, dtype=np.uint64) + np.uint64(hash_words(seed, epoch)))
        self._indices = np.argsort(hashes, kind="stable")

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Indices (int64) at any positions below n, in their shape."""
        return self._indices[positions]

    def inverse(self, indices: np.ndarray) -> np.ndarray:
        """Positions (int64) of any indices below n, in their shape."""
        return np.argsort(self._indices)[indices]


class FeistelOrder:
    """0..n-1 permuted position by position: O(1) memory, and time only for what is asked."""

    def __init__(self, seed: int, epoch: int, n: int) -> None:
        self.n = n
        self._network = _Network(seed, epoch, max(MIN_BITS, (n - 1).bit_length()))

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Indices (int64) at any positions below n, in their shape; cheapest by the thousand."""
        return self._walk(positions, self._network.permute)

    def inverse(self, indices: np.ndarray) -> np.ndarray:
        """Positions (int64) of any indices below n, in their shape: the network backwards."""
        return self._walk(indices, self._network.restore)

    def _walk(self, start: np.ndarray, step: Any) -> np.ndarray:
        """``step`` again and again, until it leads to where the numbers below n are."""
        values = step(start.astype(np.uint64).ravel())
        (outside,) = np.nonzero(values >= self.n)
        while len(outside):
            values[outside] = again = step(values[outside])
            outside = outside[again >= self.n]
        return values.view(np.int64).reshape(start.shape)


class SetOrders:
    """A permutation of 0..size-1 for each of many numbered sets, such as classes or batches.

    The sizes may differ; a set's order depends on (seed, epoch), its number and its size.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._seed = (seed, epoch)

    def at(self, sets: np.ndarray, sizes: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Indices (int64) at ``positions`` of the sets so numbered and sized; all flat, (P,)."""
        widths = np.maximum(MIN_BITS, np.frexp(sizes - 1.0)[1]).astype(np.uint64)
        tweaks = mix(sets.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        bounds = sizes.astype(np.uint64)
        values = positions.astype(np.uint64)
        outside = np.arange(len(values))
        while len(outside):
            network = _Network(*self._seed, widths[outside], tweaks[outside])
            values[outside] = again = network.permute(values[outside])
            outside = outside[again >= bounds[outside]]
        return values.view(np.int64)


class _Network:
    """A Feistel network over the numbers below 2**bits; ``bits`` one for all, or one for each."""

    def __init__(self, seed: int, epoch: int, bits: Any, tweaks: Any = None) -> None:
        bits = np.uint64(bits) if isinstance(bits, int) else bits
        one, half = np.uint64(1), bits >> np.uint64(1)
        self._shift = bits - half  # the width of the right half, the wider one
        self._widths = (one << half) - one, (one << self._shift) - one  # masks: left, right
        keys = [np.uint64(hash_words(seed, epoch, number)) for number in range(ROUNDS)]
        self._keys = keys if tweaks is None else [key + tweaks for key in keys]

    def permute(self, values: np.ndarray) -> np.ndarray:
        """One pass through the network; the halves swap, and so do their widths."""
        left, right = values >> self._shift, values & self._widths[1]
        for number, key in enumerate(self._keys):
            left, right = right, left ^ (mix(right + key) & self._widths[number % 2])
        permuted: np.ndarray = (left << self._shift) | right
        return permuted

    def restore(self, values: np.ndarray) -> np.ndarray:
        """The pass backwards: what ``permute`` has made these of."""
        left, right = values >> self._shift, values & self._widths[1]
        for number, key in reversed(list(enumerate(self._keys))):
            left, right = right ^ (mix(left + key) & self._widths[number % 2]), left
        restored: np.ndarray = (left << self._shift) | right
        return restored


def mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer of uint64 numbers, modulo 2**64."""
    mixed: np.ndarray = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
