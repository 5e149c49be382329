"""Sampling by weights from a file."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from selftask.config.fields import setting
from selftask.data.sampling.sampler import FlatOrder, Pool, Sampler
from selftask.errors import UserError, nearest_path
from selftask.files.paths import is_file
from selftask.random.permutation import EpochOrder
from selftask.random.splitmix import hash_words, mix
from selftask.registry import register_sampler

_STREAM = 0x77656967  # "weig": separates these draws from other uses of the same seed


@register_sampler("weighted")
class Weighted(Sampler):
    """Independent draws with replacement, by weights from a file (.npy, or one number per line).

    The weights are in the order of the images and need not add up to one. The sampler keeps 8 bytes
    per image.
    """

    repeats = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        weights: str
        """File with one weight per image: a .npy file, or a text with one number per line."""
        samples: int | None = setting(None, min=1)
        """Number of samples per epoch; null: the number of images."""

    def __init__(self, config: Config, pool: Pool) -> None:
        super().__init__(config, pool)
        self.num_samples = config.samples or pool.num_images
        weights = _read(config.weights, pool.num_images)
        self._sums = np.cumsum(weights)
        self._num_drawn = int(np.count_nonzero(weights))
        self._last = int(np.flatnonzero(weights)[-1])

    def order(self, epoch: int) -> EpochOrder:
        key = np.uint64(hash_words(self.pool.seed, _STREAM, epoch))

        def at(positions: np.ndarray) -> np.ndarray:
            bits = mix(mix(positions.astype(np.uint64) + key))
            points = (bits >> np.uint64(11)) * 2.0**-53 * self._sums[-1]
            indices = np.searchsorted(self._sums, points, side="right")
            return np.minimum(indices, self._last)  # rounding may give an index above the last

        return FlatOrder(at)

    def describe(self) -> str:
        return (
            f"weighted, draws from {self._num_drawn:,} of {self.pool.num_images:,} images "
            f"by {self.config.weights}"
        )


def _read(path: str, num_images: int) -> np.ndarray:
    """Read weights, float64 (num_images,); raises UserError."""
    file = os.path.expanduser(path)
    prefix = f"data.sampler.weights={path!r}"
    if not is_file(file):
        raise UserError(f"{prefix}: there is no such file; {nearest_path(file)}")
    try:
        values = np.load(file) if file.endswith(".npy") else np.loadtxt(file, ndmin=1)
        weights = np.asarray(values, dtype=np.float64)
    except OSError as error:
        raise UserError(f"{prefix}: {error.strerror or error}") from error
    except (EOFError, TypeError, ValueError) as error:
        raise UserError(f"{prefix}: expected .npy, or one number a line: {error}") from error
    if weights.shape != (num_images,):
        raise UserError(f"{prefix}: shape {weights.shape}; expected ({num_images},), one per image")
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        raise UserError(
            f"{prefix}: weight {weights[wrong[0]]} of image {wrong[0]}; weights must be "
            "finite and at least 0"
        )
    if not weights.any():
        raise UserError(f"{prefix}: all weights are 0, so nothing could be drawn")
    return weights
