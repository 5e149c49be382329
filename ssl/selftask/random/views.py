"""Random streams for augmentation: one for each (seed, epoch, sample, view).

A stream is NumPy's Philox generator with the counter (block, view, index, epoch), so that draws do
not depend on worker, rank, batch or resume. ``ViewDraws`` gives the stream of one view, ``Streams``
the streams of a batch, with the same numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from selftask.random.philox import philox
from selftask.random.splitmix import MASK

STREAM = 0x76696577  # "view": separates these draws from other uses of the same seed
_FIRST = 24  # draws computed at once; enough for most pipelines


def draw_rng(seed: int, epoch: int, index: int, view: int) -> np.random.Generator:
    """Return the generator for all draws of one view of one sample.

    Args:
        seed: Seed of the run.
        epoch: Number of the epoch; for a repeated image, the first number of its ``Batch.key``.
        index: Index of the sample.
        view: Number of the view.
    """
    return ViewDraws(seed).at(epoch, index, view)


class ViewDraws:
    """Generators of many views in turn: a single generator whose counter is set for each view."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        key = np.array([seed & MASK, STREAM], dtype=np.uint64)
        self._philox = np.random.Philox(key=key)
        self._generator = np.random.Generator(self._philox)
        self._state: Any = dict(self._philox.state)
        self._state["state"] = {"counter": np.zeros(4, dtype=np.uint64), "key": key}

    def at(self, epoch: int, index: int, view: int) -> np.random.Generator:
        """Return the generator at the start of a view's stream; valid until the next call.

        Args:
            epoch: Number of the epoch; of a repeated image, the first number of its ``Batch.key``.
            index: Index of the sample.
            view: Number of the view.
        """
        self._state["state"]["counter"][:] = (0, view, index, epoch)
        self._philox.state = self._state
        return self._generator


def draw_at(rng: np.random.Generator, block: int) -> float:
    """Return the first draw of a block of the stream of ``rng``, in [0, 1).

    Blocks have four draws and are numbered from 0. The position of ``rng`` has no effect and does
    not change. A generator other than Philox has no blocks: its next draw is returned.
    """
    state: Any = rng.bit_generator.state
    if state["bit_generator"] != "Philox":
        return rng.random()
    counter = state["state"]["counter"].copy()
    counter[0] = block
    philox_at = np.random.Philox(key=state["state"]["key"], counter=counter)
    return np.random.Generator(philox_at).random()


def uniforms(
    seed: int, epochs: np.ndarray, indices: np.ndarray, view: int, count: int, start: int = 0
) -> np.ndarray:
    """Return uniform draws of many streams, bit-identical to ``draw_rng(...).random()``.

    Args:
        seed: Seed of the run.
        epochs: int64 (N,), epoch of each sample.
        indices: int64 (N,), index of each sample.
        view: Number of the view.
        count: Number of draws of each stream.
        start: Position of the first draw, a multiple of four.

    Returns:
        float64 (N, count) in [0, 1).
    """
    blocks = np.arange(start // 4, start // 4 + -(-count // 4), dtype=np.uint64)
    shape = (len(indices), len(blocks))
    words = [np.broadcast_to(blocks + np.uint64(1), shape), np.full(shape, view, np.uint64)]
    words += [np.broadcast_to(_words(one)[:, None], shape) for one in (indices, epochs)]
    mixed = np.stack(philox(words, (seed & MASK, STREAM)), axis=2).reshape(len(indices), -1)
    return (mixed[:, :count] >> np.uint64(11)) * 2.0**-53


def _words(numbers: np.ndarray) -> np.ndarray:
    return np.asarray(numbers, dtype=np.int64).view(np.uint64)


class Streams:
    """The streams of N samples in one view; each has its own position.

    Args:
        seed: Seed of the run.
        epochs: int64 (N,), epoch of each sample.
        indices: int64 (N,), index of each sample.
        view: Number of the view.
    """

    def __init__(self, seed: int, epochs: np.ndarray, indices: np.ndarray, view: int) -> None:
        self._at = (seed, epochs, indices, view)
        self._draws = uniforms(*self._at, _FIRST)
        self._positions = np.zeros(len(indices), dtype=np.int64)

    def random(self, count: int, rows: np.ndarray | None = None) -> np.ndarray:
        """Return the next ``count`` draws of each stream, float64 (R, count) in [0, 1).

        Args:
            count: Number of draws.
            rows: int64 (R,), numbers of the streams, without repetition; None for all N.
        """
        some = np.arange(len(self._positions)) if rows is None else rows
        positions = self._positions[some, None] + np.arange(count)
        while len(some) and positions.max() >= self._draws.shape[1]:
            more = uniforms(*self._at, _FIRST, start=self._draws.shape[1])
            self._draws = np.concatenate([self._draws, more], axis=1)
        self._positions[some] += count
        return self._draws[some[:, None], positions]
