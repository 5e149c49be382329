"""The streams of ``view_draws.ViewDraws`` for many samples at once.

Philox is counter-based: the k-th block of four words is a function of (key, counter + k) alone,
so that the draws of a whole batch are a few hundred numpy operations, whatever its size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from selftask.random.views import MASK, STREAM

ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)  # added to the key each round
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_FIRST = 24  # draws computed at once; enough for most pipelines


def uniforms(
    seed: int, epochs: np.ndarray, indices: np.ndarray, view: int, count: int, start: int = 0
) -> np.ndarray:
    """(N, count) float64 in [0, 1): row i is ``draw_rng(seed, epochs[i], indices[i], view)``'s.

    From its draw ``start`` on, a multiple of four. Equal bit for bit.
    """
    blocks = np.arange(start // 4, start // 4 + -(-count // 4), dtype=np.uint64)
    shape = (len(indices), len(blocks))
    words = [np.broadcast_to(blocks + np.uint64(1), shape), np.full(shape, view, np.uint64)]
    words += [np.broadcast_to(_words(one)[:, None], shape) for one in (indices, epochs)]
    mixed = np.stack(philox(words, (seed & MASK, STREAM)), axis=2).reshape(len(indices), -1)
    draws: np.ndarray = (mixed[:, :count] >> np.uint64(11)) * 2.0**-53
    return draws


def philox(words: list[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Philox4x64-10 of four words each, uint64 of one shape, under one key."""
    a, b, c, d = words
    for number in range(ROUNDS):
        left, right = (np.uint64((k + number * w) & MASK) for k, w in zip(key, _WEYL, strict=True))
        high_a, low_a = _product(a, _MULTIPLIERS[0])
        high_c, low_c = _product(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ left, low_c, high_a ^ d ^ right, low_a
    return [a, b, c, d]


def _product(x: np.ndarray, multiplier: int) -> tuple[np.ndarray, np.ndarray]:
    """The upper and the lower 64 bits of x * multiplier, from products of halves."""
    m_high, m_low = np.uint64(multiplier >> 32), np.uint64(multiplier & 0xFFFFFFFF)
    x_high, x_low = x >> _HALF, x & _LOW
    low = x_low * m_low
    middle = x_high * m_low + (low >> _HALF)
    other = x_low * m_high + (middle & _LOW)
    high = x_high * m_high + (middle >> _HALF) + (other >> _HALF)
    return high, x * np.uint64(multiplier)


def _words(numbers: np.ndarray) -> np.ndarray:
    return np.asarray(numbers, dtype=np.int64).view(np.uint64)


class Streams:
    """One stream for each of N samples, in one view; each has a position of its own."""

    def __init__(self, seed: int, epochs: np.ndarray, indices: np.ndarray, view: int) -> None:
        self._at = (seed, epochs, indices, view)
        self._draws = uniforms(*self._at, _FIRST)
        self._positions = np.zeros(len(indices), dtype=np.int64)

    def random(self, count: int, rows: np.ndarray | None = None) -> np.ndarray:
        """The next ``count`` draws (R, count) of all streams, or of those of some rows."""
        some = np.arange(len(self._positions)) if rows is None else rows
        places = self._positions[some, None] + np.arange(count)
        while len(some) and places.max() >= self._draws.shape[1]:
            more = uniforms(*self._at, _FIRST, start=self._draws.shape[1])
            self._draws = np.concatenate([self._draws, more], axis=1)
        self._positions[some] += count
        drawn: np.ndarray = self._draws[some[:, None], places]
        return drawn

    def at(self, rows: np.ndarray) -> Streams:
        """The streams of some rows; what is drawn from them is drawn from these."""
        return _SomeStreams(self, rows)


class _SomeStreams(Streams):
    def __init__(self, streams: Streams, rows: np.ndarray) -> None:
        self._streams = streams
        self._rows = rows

    def random(self, count: int, rows: np.ndarray | None = None) -> np.ndarray:
        return self._streams.random(count, self._rows if rows is None else self._rows[rows])


def replayed(transform: Any, draws: np.ndarray, sizes: np.ndarray) -> list[Any]:
    """What ``transform.draw`` gives for each picture if it draws these uniforms, (B, N).

    Slower than arithmetic on whole batches, faster than moving a generator for each picture.
    """
    sides = sizes.tolist()
    return [transform.draw(_Replay(row), *size) for row, size in zip(draws, sides, strict=True)]


class _Replay:
    """Uniforms that are drawn already, in place of a generator."""

    def __init__(self, draws: np.ndarray) -> None:
        self._draws = draws

    def random(self, shape: int | tuple[int, ...] | None = None) -> Any:
        count = 1 if shape is None else int(np.prod(shape))
        drawn, self._draws = self._draws[:count], self._draws[count:]
        return float(drawn[0]) if shape is None else drawn.reshape(shape)
