"""A whole augmentation program on one image in one compiled call.

The package works without it: where there was no compiler at installation, ``available()`` is false.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

try:
    from selftask.data.kernel import _augment
except ImportError:  # installed without a compiler
    _augment = None  # type: ignore[assignment]


MAX_PIXELS, MAX_SIDE = 1 << 27, 65_535  # of a picture
MAX_SIGMA = 100.0  # of BLUR, in pixels


class Op(IntEnum):
    """Operations of a program; behind each come its arguments, as numbers."""

    CROP_RESIZE = 1  # left, top, width, height, rows, columns, Filter
    HFLIP = 2
    MATRIX = 3  # 3 x 4, row by row; the last column is an offset in grey levels
    CONTRAST = 4  # factor: x * factor + (1 - factor) * round(mean luma)
    HUE = 5  # fraction of the colour circle
    GRAY = 6
    BLUR = 7  # sigma in pixels, above 0 and up to MAX_SIGMA
    SOLARIZE = 8  # values from this threshold on are inverted


class Filter(IntEnum):
    """How CROP_RESIZE resamples; both are antialiased."""

    BILINEAR = 0
    BICUBIC = 1


def available() -> bool:
    """Whether the compiled part is there."""
    return _augment is not None


def absence() -> str | None:
    """Return what to do if the compiled part is absent, or None if it is there."""
    if available():
        return None
    return (
        "absent, so that views cost about twice the CPU time: install a wheel of selftask, or a C "
        "compiler and then `pip install --force-reinstall --no-deps selftask`"
    )


def fits(height: int, width: int) -> bool:
    """Whether the kernel takes pictures of that size (rows count as multiples of 32 pixels)."""
    return height * (width + 31) <= MAX_PIXELS and max(height, width) <= MAX_SIDE


def variants() -> tuple[str, ...]:
    """Instruction sets this processor can run the kernel with, the one in use first."""
    return _augment.variants() if _augment is not None else ()


def run(image: np.ndarray, program: Sequence[float] | np.ndarray, out: np.ndarray) -> None:
    """Apply ``program`` to ``image`` and write the result to ``out``.

    image: uint8 (H, W, 3), pixels contiguous, any distance between rows (a crop's view will do)
    program: numbers, flat: an Op, its arguments, the next Op, ...; at most 64 operations
    out: uint8 (rows, columns, 3), C-contiguous, of the size that the program gives

    Values are whole numbers from 0 to 255 after every operation, rounded to nearest and clipped.
    The GIL is released meanwhile. Raises ValueError for anything that does not fit together, and
    then leaves ``out`` as it was.
    """
    if _augment is None:
        raise RuntimeError("selftask was installed without a C compiler: there is no kernel")
    _augment.run(image, program, out)
