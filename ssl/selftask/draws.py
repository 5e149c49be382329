"""Random numbers drawn on the device as a pure function of what they are for.

What a method draws for an image (a mask, a block) must not depend on worker, rank, batch or resume:
there is no generator to advance, only names of draws and a hash. Everything is int64 arithmetic on
the device, which wraps around modulo 2**64 there as unsigned arithmetic does elsewhere; nothing
waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

_METHOD = 0x6D6574686F64  # "method": keeps these draws apart from other uses of the same seed
_GOLDEN = 0x9E3779B97F4A7C15  # the odd number nearest to 2**64 / golden ratio
_BITS = 24  # of a draw: what a float32 below 1 can hold exactly


def uniform(seed: int, key: Tensor, n: int) -> Tensor:
    """``n`` draws from [0, 1) for each of the samples: float32 (B, n), on the device of ``key``.

    ``key`` (B, 2) is what the loader gives with a batch: the epoch (with a sampler that repeats
    images, a number of the showing, too) and the index. Draw j of a sample is a function of (seed,
    key, j) alone, so that asking for more draws or for other samples changes none: the epoch-th
    number of the stream that ``seed`` starts itself starts a stream, whose index-th number starts
    the one read here.
    """
    epoch, index = key.unbind(dim=1)  # (B,) each
    start = torch.full_like(epoch, _signed(seed ^ _METHOD))
    start = splitmix64(splitmix64(start, epoch), index)
    bits = splitmix64(start[:, None], torch.arange(n, device=key.device))  # (B, n)
    return _shift_right(bits, 64 - _BITS).float() * 2.0**-_BITS


def splitmix64(start: Tensor, place: Tensor) -> Tensor:
    """The 64 bits at ``place`` (from 0) of the stream from ``start``; both int64, broadcast.

    Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014, with the
    constants of Vigna's splitmix64. Two places of one stream never hold the same number.
    """
    bits = start + (place + 1) * _signed(_GOLDEN)
    bits = (bits ^ _shift_right(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ _shift_right(bits, 31)


def _shift_right(x: Tensor, places: int) -> Tensor:
    """``x >> places`` with zeros coming in, where torch's keeps the sign."""
    return (x >> places) & ((1 << (64 - places)) - 1)


def _signed(word: int) -> int:
    """The int64 of the same 64 bits."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)
