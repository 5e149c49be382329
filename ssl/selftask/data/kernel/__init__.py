"""Compiled augmentation kernel, which applies several operations to an image in one call.

selftask works without it: if there was no compiler at installation, ``available()`` is False.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

try:
    from selftask.data.kernel import _augment
except ImportError:  # installed without a compiler
    _augment = None  # type: ignore[assignment]


MAX_PIXELS, MAX_SIDE = 1 << 27, 65_535  # limits of an image
MAX_SIGMA = 100.0  # of BLUR, in pixels


class Op(IntEnum):
    """Operations of a program; each is followed by its arguments, as numbers."""

    CROP_RESIZE = 1  # left, top, width, height, rows, columns, Filter
    HFLIP = 2
    MATRIX = 3  # 3 x 4, row by row; the last column is an offset in gray levels
    CONTRAST = 4  # factor: x * factor + (1 - factor) * round(mean luma)
    HUE = 5  # fraction of the color circle
    GRAY = 6
    BLUR = 7  # sigma in pixels, above 0 and up to MAX_SIGMA
    SOLARIZE = 8  # values from this threshold on are inverted


class Filter(IntEnum):
    """Resampling filter of CROP_RESIZE; both filters are antialiased."""

    BILINEAR = 0
    BICUBIC = 1


def available() -> bool:
    """Return True if the compiled kernel is installed."""
    return _augment is not None


def absence() -> str | None:
    """Return a message with advice if the compiled kernel is not installed, else None."""
    if available():
        return None
    return (
        "absent, so that views cost about twice the CPU time: install a wheel of selftask, or a C "
        "compiler and then `pip install --force-reinstall --no-deps selftask`"
    )


def fits(height: int, width: int) -> bool:
    """Return True if the kernel accepts images of this size; rows are padded to multiples of 32."""
    return height * (width + 31) <= MAX_PIXELS and max(height, width) <= MAX_SIDE


def variants() -> tuple[str, ...]:
    """Return the kernel's instruction sets that this processor supports, the one in use first.

    Empty if the kernel is not installed.
    """
    return _augment.variants() if _augment is not None else ()


def run(image: np.ndarray, program: Sequence[float] | np.ndarray, out: np.ndarray) -> None:
    """Apply ``program`` to ``image`` and write the result to ``out``.

    Values are integers from 0 to 255 after every operation, rounded to nearest and clipped. The
    GIL is released meanwhile.

    Args:
        image: uint8 (H, W, 3) with contiguous pixels and any stride of rows, such as a cropped
            view of an array.
        program: Flat numbers: an Op, its arguments, the next Op, ...; at most 64 operations.
        out: uint8 (rows, columns, 3), C-contiguous, of the size that the program gives.

    Raises:
        ValueError: If an argument is invalid, or the arguments do not match. ``out`` is then
            unchanged.
        RuntimeError: If the kernel is not installed.
    """
    if _augment is None:
        raise RuntimeError("selftask was installed without a C compiler: there is no kernel")
    _augment.run(image, program, out)
