"""Images as the bytes of a file, whichever container they come from."""

from __future__ import annotations

import io

import numpy as np

from selftask.data.reading.files import BadImage
from selftask.data.reading.image import decode_image, from_array

_NPY = b"\x93NUMPY"


def decode(data: bytes, name: str, max_pixels: int) -> np.ndarray:
    """uint8 (H, W, 3) of an encoded image or of a .npy file; raises BadImage, about ``name``."""
    if not data.startswith(_NPY):
        return decode_image(data, name, max_pixels)
    try:
        return from_array(np.load(io.BytesIO(data), allow_pickle=False))
    except (ValueError, EOFError, OSError) as error:
        raise BadImage(name, str(error)) from error


def image_of(array: np.ndarray, name: str, channels: int = 3) -> np.ndarray:
    """uint8 (H, W, C) of an array; raises BadImage, about ``name``, for one that is no image."""
    try:
        return from_array(array, channels)
    except ValueError as error:
        raise BadImage(name, str(error)) from error
