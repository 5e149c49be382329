"""Random numbers drawn on the device as a pure function of what they are for.

What a method draws for an image (a mask, a block) must not depend on worker, rank, batch or resume:
there is no generator to advance, only names of draws and a hash. Everything is int64 arithmetic on
the device, which wraps around modulo 2**64 there as unsigned arithmetic does elsewhere; nothing
waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_METHOD = 0x6D6574686F64  # "method": keeps these draws apart from other uses of the same seed
_LAYERS = 0x6C6179657273  # "layers": the same for those of dropout and stochastic depth
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
    start = _streams(seed ^ _METHOD, key)
    bits = splitmix64(start[:, None], torch.arange(n, device=key.device))  # (B, n)
    return _shift_right(bits, 64 - _BITS).float() * 2.0**-_BITS


class LayerDraws:
    """Random words for dropout layers, a function of (seed, epoch, sample, view, layer).

    One for a process. A layer reads its row of ``words``; whoever passes several views through a
    network calls ``enter`` before each pass. Without such layers nothing is computed.

    Shape:
        words: int64 (L, N), for L layers and the N rows of the batch that is passed; None outside
        of training and without layers. Rows are samples, view after view.
    """

    def __init__(self) -> None:
        self.words: Tensor | None = None
        self._samples: Tensor | None = None  # (B,), the stream of each sample of the batch
        self.num_layers = 0
        self._seed = 0

    def reset(self, seed: int, num_layers: int) -> None:
        """Begin a run whose layers are numbered from 0."""
        self._seed, self.num_layers = seed, num_layers
        self.stop()

    def start(self, key: Tensor, device: torch.device) -> None:
        """Begin a batch of the samples ``key`` (B, 2), as given by the loader: one view of each."""
        self._samples = _streams(self._seed ^ _LAYERS, key.to(device, non_blocking=True))
        self.enter((0,))

    def stop(self) -> None:
        """End the batch: layers draw from torch's generator again."""
        self.words = self._samples = None

    def enter(self, views: Sequence[int]) -> None:
        """Begin a pass of the batch's samples through the network, in these views."""
        if self._samples is None:
            return
        device = self._samples.device
        # filled, not copied from the host, which would wait for the device
        numbers = torch.cat([torch.full((1, 1), view, device=device) for view in views])
        rows = splitmix64(self._samples, numbers).flatten()  # (N,)
        layers = torch.arange(self.num_layers, device=device)
        self.words = splitmix64(rows, layers[:, None])  # (L, N)

    @contextmanager
    def exchanged(self, exchange: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Context in which this rank processes the samples returned by ``exchange``."""
        before = self._samples, self.words
        if self._samples is not None:
            self._samples = exchange(self._samples)
            self.enter((0,))
        try:
            yield
        finally:
            self._samples, self.words = before

    @contextmanager
    def again(self, words: Tensor | None) -> Iterator[None]:
        """Context that recomputes a forward pass with the ``words`` of the first one."""
        before, self.words = self.words, words
        try:
            yield
        finally:
            self.words = before


LAYER_DRAWS = LayerDraws()


def keep_mask(words: Tensor, count: int, keep: float) -> Tensor:
    """Bool (N, ``count``), each true with probability ``keep``, to a multiple of 2**-16.

    Args:
        words: int64 (N,), the word of each row, from which the row is drawn.
        count: numbers a row; four are read from a word.
        keep: probability, from 0 to 1.
    """
    bits = words[:, None]
    if count > 4:
        bits = splitmix64(bits, torch.arange(-(-count // 4), device=words.device))
    threshold = min(round(keep * 2**16), 2**16 - 1) - 2**15
    return bits.contiguous().view(torch.int16)[:, :count] < threshold


def _streams(seed: int, key: Tensor) -> Tensor:
    """The stream that begins at each ``key`` (B, 2): int64 (B,)."""
    epoch, index = key.unbind(dim=1)
    start = torch.full_like(epoch, _signed(seed))
    return splitmix64(splitmix64(start, epoch), index)


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
