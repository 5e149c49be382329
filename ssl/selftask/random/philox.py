"""Philox4x64-10 for arrays of counters (Salmon et al., Parallel random numbers, SC 2011).

``numpy.random.Philox`` computes the blocks of one stream in order. A block is a function of its
counter and key alone, so this module computes the blocks of many streams at once.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)  # added to the key each round
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_MASK = (1 << 64) - 1


def philox(counter: list[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Return the four words of each block, as uint64 arrays of the shape of the counters.

    Args:
        counter: Counters of the blocks: four uint64 arrays of one shape, the lowest word first.
        key: Two integers of 64 bits.
    """
    a, b, c, d = counter
    for number in range(ROUNDS):
        left, right = (np.uint64((k + number * w) & _MASK) for k, w in zip(key, _WEYL, strict=True))
        high_a, low_a = _product(a, _MULTIPLIERS[0])
        high_c, low_c = _product(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ left, low_c, high_a ^ d ^ right, low_a
    return [a, b, c, d]


def _product(x: np.ndarray, multiplier: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the upper and the lower 64 bits of x * multiplier, from products of halves."""
    m_high, m_low = np.uint64(multiplier >> 32), np.uint64(multiplier & 0xFFFFFFFF)
    x_high, x_low = x >> _HALF, x & _LOW
    low = x_low * m_low
    middle = x_high * m_low + (low >> _HALF)
    other = x_low * m_high + (middle & _LOW)
    high = x_high * m_high + (middle >> _HALF) + (other >> _HALF)
    return high, x * np.uint64(multiplier)
