"""Mean and standard deviation of pixels, and image sizes.

All sums are sums of integers, so they are exact and independent of the order of the images and the
number of processes. Only the final divisions round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from selftask.data.inspect.worker_pool import map_images
from selftask.data.reading.files import now_reading
from selftask.data.source import Source
from selftask.errors import BadImage, UserError

_FULL = 255  # largest 8-bit value; mean and std are on the scale [0, 1], as for `normalize`
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


class Sums(NamedTuple):
    """Size of one image, and exact sums over its pixels."""

    width: int  # in pixels
    height: int
    sums: tuple[int, ...]  # of the pixel values, one for each channel
    squares: tuple[int, ...]  # of their squares


class Moments(NamedTuple):
    """Mean and standard deviation of each channel, on the scale [0, 1]."""

    mean: list[float]
    std: list[float]


@dataclass
class Statistics:
    """Result of ``measure``."""

    num_images: int  # images read
    num_unreadable: int
    by_image: Moments  # all images have equal weight, like their crops in training
    by_pixel: Moments  # all pixels have equal weight
    sides: np.ndarray  # (num_images, 2) int64: width and height
    seconds: float
    num_workers: int

    def quantiles(self) -> dict[str, list[float]]:
        """Return the QUANTILES of width, height and other measures of size, by name.

        Sides are in pixels, and each value is that of an image (no interpolation).
        """
        width, height = self.sides[:, 0], self.sides[:, 1]
        measures = {
            "width": width,
            "height": height,
            "short side": np.minimum(width, height),
            "long side": np.maximum(width, height),
            "width/height": width / height,
        }
        return {
            name: np.quantile(values, QUANTILES, method="inverted_cdf").tolist()
            for name, values in measures.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values, for ``--json``."""
        return {
            "images": self.num_images,
            "unreadable": self.num_unreadable,
            "mean": self.by_image.mean,
            "std": self.by_image.std,
            "pixel_mean": self.by_pixel.mean,
            "pixel_std": self.by_pixel.std,
            "quantiles": {"at": list(QUANTILES), **self.quantiles()},
            "seconds": round(self.seconds, 3),
            "workers": self.num_workers,
        }


def choose(num_images: int, most: int | None, seed: int) -> np.ndarray:
    """Return sorted indices of all images, or of a random sample without replacement.

    Args:
        num_images: Number of images.
        most: Largest number of indices; None: all.
        seed: Seed of the draw.

    Returns:
        int64 (N,).
    """
    if most is None or most >= num_images:
        return np.arange(num_images)
    drawn = np.random.default_rng(seed).choice(num_images, most, replace=False, shuffle=False)
    return np.sort(drawn)


def measure(
    source: Source,
    num_workers: int,
    *,
    most: int | None = None,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> Statistics:
    """Read images in several processes and compute statistics of pixels and sizes.

    Args:
        source: The images.
        num_workers: Number of processes.
        most: Number of images, drawn at random; None: all.
        seed: Seed of this draw.
        progress: Called with the number of images processed so far.

    Raises:
        UserError: If no image can be read, or images have different numbers of channels.
        RunError: If an image is not uint8 (H, W, C), if reading one raises another error than
            BadImage, or if processes repeatedly die before they read anything.
    """
    started = time.perf_counter()
    indices = choose(len(source), most, seed)
    table: np.ndarray | None = None  # int64, width, height, sums and squares of each image

    results = map_images(partial(sums_of, source), indices, num_workers)
    for done, (index, image) in enumerate(results, 1):
        if isinstance(image, Sums):
            if table is None:
                table = np.zeros((len(indices), 2 + 2 * len(image.sums)), dtype=np.int64)
            row = [image.width, image.height, *image.sums, *image.squares]
            if len(row) != table.shape[1]:
                raise UserError(
                    f"{source.path(index)}: has {len(image.sums)} channels, and images before it "
                    f"have {table.shape[1] // 2 - 1}; all images need the same number"
                )
            table[np.searchsorted(indices, index)] = row
        progress(done)
    if table is None:
        raise UserError(f"none of {len(indices)} images can be read; see `selftask data check`")
    table = table[table[:, 0] > 0]
    sides, sums = table[:, :2], np.stack(np.split(table[:, 2:], 2, axis=1))
    pixels = sides.prod(axis=1)[:, None]
    return Statistics(
        num_images=len(table),
        num_unreadable=len(indices) - len(table),
        by_image=_moments(*(sums / pixels).mean(axis=1)),
        by_pixel=_moments(*sums.sum(axis=1) / pixels.sum()),
        sides=sides,
        seconds=time.perf_counter() - started,
        num_workers=num_workers,
    )


def sums_of(source: Source, index: int) -> Sums | None:
    """Return size and exact sums of one image, or None if the image is unreadable."""
    now_reading(source.path(index))
    try:
        pixels = np.asarray(source[index][0])
    except BadImage:
        return None
    return sums_of_pixels(pixels)


def sums_of_pixels(pixels: np.ndarray) -> Sums:
    """Return the sums over an image, uint8 (H, W, C).

    They are below 2**53 and thus exact in float64.

    Raises:
        UserError: If the array is not such an image.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3:
        raise UserError(f"an image is {pixels.dtype} {pixels.shape}; uint8 (H, W, C) is expected")
    values = pixels.reshape(-1, pixels.shape[2]).astype(np.float64)
    ones = np.ones(len(values))
    sums, squares = ones @ values, np.einsum("pc,pc->c", values, values)
    height, width = pixels.shape[:2]
    return Sums(width, height, tuple(map(int, sums)), tuple(map(int, squares)))


def _moments(means: np.ndarray, squares: np.ndarray) -> Moments:
    """Return mean and deviation of each channel in [0, 1], from the means of values and squares."""
    deviations = np.sqrt(np.maximum(squares - means**2, 0.0))
    return Moments((means / _FULL).tolist(), (deviations / _FULL).tolist())
