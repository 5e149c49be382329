"""splitmix64 for Python integers, NumPy arrays and tensors; the same 64 bits in all three.

Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014, with the
constants of Vigna's splitmix64.c.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor  # not imported: configs are checked without torch

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # the odd number nearest to 2**64 / golden ratio
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def hash_words(*words: int) -> int:
    """Hash integers to one integer in [0, 2**64): one step of splitmix64 for each word."""
    state = 0
    for word in words:
        state = (state + (word & MASK) + GOLDEN) & MASK
        state = ((state ^ (state >> 30)) * _FIRST) & MASK
        state = ((state ^ (state >> 27)) * _SECOND) & MASK
        state ^= state >> 31
    return state


def mix(values: np.ndarray) -> np.ndarray:
    """Apply splitmix64's finalizer to a uint64 array of any shape, modulo 2**64."""
    mixed: np.ndarray = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(_FIRST)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_SECOND)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def splitmix64(start: Tensor, position: Tensor) -> Tensor:
    """Return the 64 bits at ``position`` of the stream that begins at ``start``.

    The numbers of one stream are all different.

    Args:
        start: int64 of any shape, the state before the first number.
        position: int64, from 0; broadcast with ``start``.

    Returns:
        int64, of the broadcast shape.
    """
    bits = start + (position + 1) * as_signed(GOLDEN)  # int64 wraps around modulo 2**64
    bits = (bits ^ shift_right(bits, 30)) * as_signed(_FIRST)
    bits = (bits ^ shift_right(bits, 27)) * as_signed(_SECOND)
    return bits ^ shift_right(bits, 31)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 of any shape to the right, filling with zeros; ``>>`` repeats the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def as_signed(word: int) -> int:
    """Return the signed 64-bit integer that equals ``word`` modulo 2**64."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)
