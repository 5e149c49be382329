"""Random numbers drawn on the device as a pure function of (seed, epoch, sample) or (seed, batch).

A method's draws for an image (a mask, a block) must not depend on worker, rank, batch or resume.
Therefore there is no generator. Keys are hashed by ``splitmix64``, in int64 arithmetic on the
device, without synchronization with the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selftask.distributed.accelerator import copy_to, has_float64
from selftask.random.splitmix import as_signed, shift_right, splitmix64

_METHOD = 0x6D6574686F64  # "method": separates these draws from other uses of the same seed
_BATCHES = 0x62617463686573  # "batches": the same for draws that all samples of a batch share
_LAYERS = 0x6C6179657273  # "layers": the same for draws of dropout and stochastic depth
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of a network's rows
_BITS = 24  # bits of a draw; a float32 below 1 represents 24 bits exactly


def uniform(seed: int, key: Tensor, n: int) -> Tensor:
    """Draw ``n`` numbers from [0, 1) for each sample.

    Draw j of a sample is a function of (seed, key, j) only: more draws or other samples in the
    batch do not change it. The draws of a sample are the stream of ``splitmix64`` that starts at
    ``splitmix64(splitmix64(s, epoch), index)``, where s is ``seed`` XOR a constant.

    Args:
        seed: Seed of the run.
        key: int64 (B, 2), the loader's key of each sample: epoch and index. A sampler that repeats
            images combines the epoch with the number of the repeat.
        n: Number of draws for each sample.

    Returns:
        float32 (B, n), on the device of ``key``.
    """
    start = _streams(seed ^ _METHOD, key)
    bits = splitmix64(start[:, None], torch.arange(n, device=key.device))  # (B, n)
    return shift_right(bits, 64 - _BITS).float() * 2.0**-_BITS


def batch_uniform(seed: int, number: int, n: int, device: torch.device | str = "cpu") -> Tensor:
    """Draw ``n`` numbers from [0, 1) for a whole batch, equal on all ranks.

    They depend on (seed, number) only, so they are the same after a resume. Use them for a choice
    that all images of a batch share, such as a crop size or a rotation.

    Args:
        seed: Seed of the run.
        number: ``batch.number``, the index of the global batch.
        n: Number of draws.
        device: Device of the result.

    Returns:
        float32 (n,).
    """
    return _of_batch(seed, number, n, device).float() * 2.0**-_BITS


def batch_normal(seed: int, number: int, n: int, device: torch.device | str = "cpu") -> Tensor:
    """Draw ``n`` standard normal numbers for a whole batch, equal on all ranks.

    They depend on (seed, number) only, as in ``batch_uniform``. Use them, for example, as random
    directions onto which features are projected.

    Args:
        seed: Seed of the run.
        number: ``batch.number``, the index of the global batch.
        n: Number of draws.
        device: Device of the result.

    Returns:
        float32 (n,), all finite.
    """
    halves = _of_batch(seed, number, n, device) | 1  # odd: never 0 or 1, and exact in float32
    return torch.special.ndtri(halves.float() * 2.0**-_BITS)


def _of_batch(seed: int, number: int, n: int, device: torch.device | str) -> Tensor:
    """Return ``n`` integers of ``_BITS`` random bits, int64 (n,)."""
    positions = torch.arange(n, device=device)
    start = torch.full_like(positions, as_signed(seed ^ _BATCHES))
    batches = splitmix64(start, torch.full_like(positions, number))
    return shift_right(splitmix64(batches, positions), 64 - _BITS)


class Keep(NamedTuple):
    """Keep probability and scale of a dropout or stochastic depth layer."""

    probability: float = 1.0
    """Probability that an element (dropout) or a row (stochastic depth) is kept."""
    scale: float = 1.0
    """Factor of kept values; dropped values have the factor 0."""


class LayerDraws:
    """Random words of 64 bits for dropout layers: functions of (seed, epoch, sample, view, layer).

    There is one object per process. ``draw`` draws all words of a batch on the host, ahead of the
    step. ``words`` is set before each forward pass of a backbone, and each layer reads its own row
    of this tensor. ``extract`` and ``Network`` count the views of a call, so methods do not have
    to. Without dropout layers nothing is computed.

    Shape:
        words: int64 (L, N), for L layers and the N images of the forward pass: all samples of one
        view, then those of the next. None outside of training and without layers.
    """

    def __init__(self) -> None:
        self._use(None)
        self._table: Tensor | None = None  # (L, V, B), on the device
        self._exchange: Callable[[Tensor], Tensor] | None = None
        self._next_view = 0
        self._num_views = 1  # of the batches so far, to draw for
        self._limits: Any = None  # (L, 1) of random bits
        self._scales: dict[torch.dtype, Tensor] = {}  # (L, 1) of each layer, by type of the rows
        self._layers: list[Keep] = []
        self._seed = 0

    def reset(self, seed: int, layers: Sequence[Keep] = ()) -> None:
        """Set the seed and the dropout layers of a new run, and discard earlier draws.

        Layers are numbered from 0 in this order.
        """
        self._seed, self._layers, self._limits = seed, [*layers], None
        self._num_views = 1
        self.stop()

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def draw(self, key: Tensor, num_views: int) -> Tensor:
        """Draw the words of a batch; loader processes call this method, too.

        Args:
            key: int64 (B, 2), epoch and index of each sample, as given by the loader.
            num_views: Number V of views of each sample.

        Returns:
            int64 (L, V, B), on the device of ``key``.
        """
        numbers = torch.arange(max(num_views, self.num_layers), device=key.device)[:, None, None]
        samples = _streams(self._seed ^ _LAYERS, key)  # (B,)
        views = splitmix64(samples, numbers[:num_views, 0])  # (V, B)
        return splitmix64(views, numbers[: self.num_layers])

    def start(self, key: Tensor, device: torch.device, table: Tensor | None = None) -> None:
        """Begin a batch, and set the words for its first view.

        Args:
            key: int64 (B, 2), on the CPU, as given by the loader.
            device: Device of the network.
            table: Result of ``draw``, on ``device``. None: the words are drawn now.
        """
        self._key, self._exchange = key, None
        self._table = self._drawn(device) if table is None else table
        if self._limits is None or self._limits.device != device:
            limits = [_limit(layer.probability) for layer in self._layers]
            self._limits = torch.tensor(limits, dtype=torch.int16).to(device)[:, None]  # (L, 1)
            dtypes = _DTYPES if has_float64(device) else _DTYPES[:3]
            self._scales = {dtype: self._scales_in(dtype).to(device) for dtype in dtypes}
        self.enter((0,))
        self.restart()

    def _drawn(self, device: torch.device) -> Tensor:
        return copy_to(device, self.draw(self._key, self._num_views))

    def stop(self) -> None:
        """End the batch: layers draw from torch's generator again."""
        self._table = None
        self._use(None)

    def restart(self) -> None:
        """Begin a call of a network; its first view is number 0."""
        self._next_view = 0

    def enter_next(self, rows: int) -> None:
        """Set the words for the next forward pass of a network call, over ``rows`` images.

        If ``rows`` is not a multiple of the batch's number of samples, the words do not change.
        Outside of a batch this has no effect.
        """
        if self._table is not None:
            number, rest = divmod(rows, self._table.shape[2])
            if not rest:
                self.enter(range(self._next_view, self._next_view + number))

    def enter(self, views: Sequence[int]) -> None:
        """Set the words for a forward pass of these views of all samples of the batch.

        Outside of a batch this has no effect.
        """
        if self._table is None:
            return
        first, end = min(views), max(views) + 1
        self._next_view = max(self._next_view, end)
        if end > self._table.shape[1]:
            self._num_views = end
            self._table = self._exchanged(self._drawn(self._table.device))
        rows = self._table[:, first:end]  # (L, views, B)
        if len(views) != end - first:
            rows = torch.stack([self._table[:, view] for view in views], dim=1)
        self._use(rows.flatten(1))  # (L, N)

    def factors(self, layer: int, dtype: torch.dtype) -> Tensor:
        """Return the factor of each row (N,) for a layer that keeps or drops whole rows.

        The first call of a forward pass with this dtype computes the factors of all layers.

        Args:
            layer: Number of the layer.
            dtype: Type of the rows, and of the result.
        """
        assert self.words is not None
        if dtype not in self._factors:
            kept = self.words.view(torch.int16)[:, ::4] < self._limits  # as in ``keep_mask``
            self._factors[dtype] = kept * self._scales[dtype]  # (L, N)
        return self._factors[dtype][layer]

    def _scales_in(self, dtype: torch.dtype) -> Tensor:
        """Return the scales of all layers, (L, 1), rounded as a single layer rounds its own."""
        scales = torch.tensor([layer.scale for layer in self._layers], dtype=torch.float64)
        return scales.to(torch.promote_types(dtype, torch.float32)).to(dtype)[:, None]

    def _use(self, words: Tensor | None) -> None:
        self.words = words
        self._factors: dict[torch.dtype, Tensor] = {}

    @contextmanager
    def exchanged(self, exchange: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Context manager for forward passes whose samples were exchanged or selected.

        Args:
            exchange: Function that exchanges or selects rows of a tensor (B, ...) in the same way,
                such as ``shuffle_bn``. It is applied to the words.
        """
        with self._restored():
            if self._table is not None:
                self._exchange = exchange
                self._table = self._exchanged(self._table)
                self.enter((0,))
                self.restart()
            yield

    def _exchanged(self, table: Tensor) -> Tensor:
        """Apply the function of ``exchanged``, if one is active, to words (L, V, B)."""
        if self._exchange is None:
            return table
        return self._exchange(table.permute(2, 0, 1)).permute(1, 2, 0).contiguous()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager in which ``words`` is None, for a network with disabled dropout."""
        with self._restored():
            self.stop()
            yield

    @contextmanager
    def again(self, words: Tensor | None) -> Iterator[None]:
        """Context manager that sets ``words``, to repeat a forward pass with the same draws."""
        with self._restored():
            self._use(words)
            yield

    @contextmanager
    def _restored(self) -> Iterator[None]:
        before = self._table, self._exchange, self.words
        try:
            yield
        finally:
            self._table, self._exchange, words = before
            self._use(words)


LAYER_DRAWS = LayerDraws()


def keep_mask(words: Tensor, count: int, keep: float) -> Tensor:
    """Draw a bool mask (N, ``count``); each entry is True with probability ``keep``.

    The probability is rounded to a multiple of 2**-16 and is at most 1 - 2**-16.

    Args:
        words: A random word for each row, int64 (N,).
        count: Number of entries per row; above 4, more words are derived from the row's word.
        keep: Probability, from 0 to 1.
    """
    bits = words[:, None]
    if count > 4:
        bits = splitmix64(bits, torch.arange(-(-count // 4), device=words.device))
    return bits.contiguous().view(torch.int16)[:, :count] < _limit(keep)


def _limit(keep: float) -> int:
    """Return the limit below which a random int16 lies with probability ``keep``."""
    return min(round(keep * 2**16), 2**16 - 1) - 2**15


def _streams(seed: int, key: Tensor) -> Tensor:
    """Return the start of each sample's stream, int64 (B,)."""
    epoch, index = key.unbind(dim=1)
    start = torch.full_like(epoch, as_signed(seed))
    return splitmix64(splitmix64(start, epoch), index)
