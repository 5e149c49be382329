"""Decoding of images from bytes or arrays of any container."""

from __future__ import annotations

import io

import numpy as np

from selftask.data.reading.files import BadImage
from selftask.data.reading.image import decode_image, from_array

_NPY = b"\x93NUMPY"


def decode(data: bytes, name: str, max_pixels: int) -> np.ndarray:
    """Decode an image or .npy file to uint8 (H, W, 3); raises BadImage about ``name``."""
    if not data.startswith(_NPY):
        return decode_image(data, name, max_pixels)
    try:
        return from_array(np.load(io.BytesIO(data), allow_pickle=False))
    except (ValueError, EOFError, OSError) as error:
        raise BadImage(name, str(error)) from error


def image_of(array: np.ndarray, name: str, channels: int = 3) -> np.ndarray:
    """Convert an array to an image, uint8 (H, W, C); raises BadImage about ``name``."""
    try:
        return from_array(array, channels)
    except ValueError as error:
        raise BadImage(name, str(error)) from error
