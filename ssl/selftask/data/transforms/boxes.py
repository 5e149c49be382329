"""Random boxes, for crops and erased rectangles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from selftask.data.transforms.transform import SCALARS

Box = tuple[int, int, int, int]  # left, top, right, bottom, in pixels
TRIES = 10  # attempts to draw a box that fits into the image

# A function of four uniforms, height, width and ``xp``, as in ``UniformTransform.params_of``. It
# returns whether the box fits, and (left, top, right, bottom).
Attempt = Callable[..., Any]


def first_fit(rng: np.random.Generator, height: int, width: int, attempt: Attempt) -> Any:
    """Return the first random box (left, top, right, bottom) that fits into an image.

    None if none of ``TRIES`` boxes fits.

    Args:
        rng: Generator of the draws.
        height: Height of the image, in pixels.
        width: Width of the image, in pixels.
        attempt: Function that computes a box from uniforms; see ``Attempt``.
    """
    for _ in range(TRIES):
        fits, box = attempt(rng.random(4).tolist(), height, width, SCALARS)
        if fits:
            return box
    return None


def random_box(
    uniforms: Sequence[Any],
    height: Any,
    width: Any,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    xp: Any,
) -> tuple[Any, Any, Any, Any]:
    """Return a box of random area and aspect ratio, which may be larger than the image.

    Args:
        uniforms: Four numbers in [0, 1), or arrays: for area, aspect ratio, left and top.
        height: Height of the image, in pixels.
        width: Width of the image, in pixels.
        scale: Range of the box's area, as a fraction of the image's area.
        ratio: Range of width / height, drawn log-uniformly.
        xp: Math functions: ``SCALARS`` for numbers, NumPy for arrays.

    Returns:
        Left, top, width and height, in whole pixels.
    """
    of_area, of_ratio, of_left, of_top = uniforms
    low, high = math.log(ratio[0]), math.log(ratio[1])
    area = height * width * (scale[0] + (scale[1] - scale[0]) * of_area)
    aspect = xp.exp(low + (high - low) * of_ratio)
    w, h = xp.rint(xp.sqrt(area * aspect)), xp.rint(xp.sqrt(area / aspect))
    return xp.floor(of_left * (width - w + 1)), xp.floor(of_top * (height - h + 1)), w, h
