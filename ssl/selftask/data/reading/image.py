"""Read one image of any format as upright 8-bit RGB, or raise ``BadImage``."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from selftask.data.reading.files import (
    POLICY,
    BadImage,
    check_size,
    in_time,
    is_transient,
    open_regular,
    read_bytes,
)

MAX_PIXELS = 178_956_970  # Pillow's limit for decompression bombs

_ORIENTATION_TAG = 0x0112
_JPEG = b"\xff\xd8\xff"
_SCAN = b"\xff\xda"  # begins each scan of a JPEG
_PIECE = 1 << 24  # bytes searched at once
_END = b"\xff\xd9"
_MARKER = re.compile(rb"\xff[\x02-\xcf\xd8-\xfe]")  # of a segment, or the end of the image
_JPEG_SPACES = ("YCbCr", "RGB", "Gray")  # Pillow reads others
_MAY_BE_TURNED = (b"Exif\0\0", b"tiff:Orientation")  # marks of blocks with an orientation
_HEAD = 65_536  # bytes searched for these marks; such a block is shorter


def read_image(path: str, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Read the upright RGB image of a file, uint8 (H, W, 3); of an animation the first frame.

    The content decides about the format, not the name. Raises BadImage for what cannot be
    decoded to its end, for what claims more than ``max_pixels`` (before decoding it), and for what
    is no file or cannot be read in time.
    """
    return decode_image(read_bytes(path), path, max_pixels)


def decode_image(data: bytes, name: str, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Do ``read_image`` with the bytes of a file; BadImage names ``name``."""
    try:
        check_size(len(data))
        pixels = None
        if data.startswith(_JPEG):
            _refuse_scans(data)
            pixels = _decode_jpeg(data, max_pixels)
        return _decode_with_pillow(data, max_pixels) if pixels is None else pixels
    except MemoryError:
        raise
    except Exception as error:  # decoders may raise any error on damaged data
        raise BadImage(name, _reason(error)) from error


def _decode_jpeg(data: bytes, max_pixels: int) -> np.ndarray | None:
    """Decode common JPEGs by libjpeg-turbo, in half of Pillow's time and with the same pixels.

    None for the others, and for what is damaged: what Pillow makes of them counts.
    """
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    _refuse_bomb((width, height), max_pixels)
    if space not in _JPEG_SPACES:
        return None
    try:
        pixels: np.ndarray = simplejpeg.decode_jpeg(data, "RGB")
    except ValueError:
        return None
    if any(mark in data[:_HEAD] for mark in _MAY_BE_TURNED):
        with Image.open(io.BytesIO(data)) as image:
            pixels = upright(pixels, orientation(image))
    return pixels


def _decode_with_pillow(data: bytes, max_pixels: int) -> np.ndarray:
    with _pixel_limit(max_pixels), Image.open(io.BytesIO(data)) as image:
        _refuse_bomb(image.size, max_pixels)
        image.load()
        return upright(to_rgb(image), orientation(image))


def check_header(path: str, max_pixels: int = MAX_PIXELS) -> BadImage | None:
    """Return what is wrong with the header of a file, or None. Nothing is decoded."""

    def open_header(path: str) -> None:
        with open_regular(path) as file, _pixel_limit(max_pixels), Image.open(file) as image:
            _refuse_bomb(image.size, max_pixels)

    try:
        in_time(open_header, path, POLICY.timeout_s)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        return BadImage(path, _reason(error), storage_failed=is_transient(error))
    return None


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an opened image, 1 to 8; 1 if the EXIF block is damaged."""
    try:
        number = image.getexif().get(_ORIENTATION_TAG)
    except (SyntaxError, ValueError, TypeError, KeyError, OSError, EOFError):
        return 1  # the pixels are intact
    return number if isinstance(number, int) else 1


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Apply the EXIF orientation to stored pixels (H, W, C); 5 to 8 swap the sides."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def to_rgb(image: Image.Image) -> np.ndarray:
    """Convert a Pillow image of any mode to uint8 (H, W, 3); alpha is dropped.

    Dropping alpha and the CMYK formula are Pillow's ``convert("RGB")``, which torchvision's
    image folders use too, so that figures stay comparable.
    """
    if image.mode.startswith("I") or image.mode == "F":
        return _gray_to_rgb(_to_8_bit(np.asarray(image), deep=True))
    if image.mode in ("La", "RGBa"):  # Pillow converts these only through LA and RGBA
        image = image.convert(image.mode.upper())
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def from_array(array: np.ndarray, channels: int = 3) -> np.ndarray:
    """Convert an array (H, W), (H, W, 1|3|4) or (1|3|4, H, W) of numbers to uint8 (H, W, 3).

    Floats are taken to span [0, 1], or [0, 255] where they go beyond 1, integers [0, 65535], or
    [0, 255] where they do not go beyond that and have other than 16 bits; a fourth channel is
    dropped. For other ``channels`` (H, W, channels), of an array with as many. Raises ValueError.
    """
    if channels != 3:
        return _of_channels(array, channels)
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim != 2 and not (array.ndim == 3 and array.shape[-1] in (3, 4)):
        raise ValueError(f"an array of shape {array.shape} is not an image with 1, 3 or 4 channels")
    if array.dtype != np.uint8:
        array = _to_8_bit(array)
    return _gray_to_rgb(array) if array.ndim == 2 else np.ascontiguousarray(array[..., :3])


def as_picture(image: Any, channels: int = 3) -> np.ndarray:
    """Convert a Pillow image, an array or a torch tensor to uint8 (H, W, C).

    Raises ValueError for one with another number of channels.
    """
    if isinstance(image, Image.Image):
        pixels = to_rgb(image) if channels == 3 else from_array(np.asarray(image), channels)
        return upright(pixels, orientation(image))
    array = np.asarray(image)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"a {type(image).__name__} is no image")
    return from_array(array, channels)


def _of_channels(array: np.ndarray, channels: int) -> np.ndarray:
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim == 3 and array.shape[-1] != channels == array.shape[0]:
        array = np.moveaxis(array, 0, -1)
    if array.ndim != 3 or array.shape[-1] != channels:
        what = f"{channels} channels" if channels > 1 else "1 channel"
        raise ValueError(f"an array of shape {array.shape} is not an image with {what}")
    return np.ascontiguousarray(array if array.dtype == np.uint8 else _to_8_bit(array))


def _gray_to_rgb(gray: np.ndarray) -> np.ndarray:
    return np.repeat(gray[..., None], 3, axis=2)


def _to_8_bit(array: np.ndarray, *, deep: bool = False) -> np.ndarray:
    """Scale floats by 1 or 255, integers by their 16 bits; anything wider by its own range.

    Integers of other types may well hold bytes, and are bytes where they all could be one; not
    those of files that are ``deep``, which Pillow gives as 32 bits.
    """
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    values = np.nan_to_num(array.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    is_float = np.issubdtype(array.dtype, np.floating)
    bytes_too = array.dtype.itemsize != 2 and not deep
    known = (1.0, 255.0) if is_float else (255.0, 65535.0) if bytes_too else (65535.0,)
    full = next((top for top in known if low >= 0 and high <= top), None)
    if full is None:  # no scale is declared: use the range of the values
        values, full = values - low, max(high - low, 1e-12)
    return np.rint(values * (255.0 / full)).astype(np.uint8)


def _refuse_bomb(size: tuple[int, int], max_pixels: int) -> None:
    if size[0] * size[1] > max_pixels:
        raise ValueError(f"{size[0]}x{size[1]} pixels, more than data.max_pixels={max_pixels}")


def _refuse_scans(data: bytes) -> None:
    """Raise if a JPEG has too many scans; the decoder passes over the image for each."""
    if _count_marks(data) <= POLICY.max_scans:
        return
    scans = _count_scans(data)
    if scans > POLICY.max_scans:
        raise ValueError(f"{scans} scans, more than data.max_scans={POLICY.max_scans}")


def _count_marks(data: bytes) -> int:
    """Return how often _SCAN occurs, also behind the image; ``data.count`` is slower."""
    values = np.frombuffer(data, np.uint8)
    pieces = (values[first : first + _PIECE + 1] for first in range(0, len(values), _PIECE))
    first, second = _SCAN
    return sum(int(np.count_nonzero((p[:-1] == first) & (p[1:] == second))) for p in pieces)


def _count_scans(data: bytes) -> int:
    """Return the number of scans of a JPEG up to its end marker: phones append whole videos."""
    scans, found = 0, _MARKER.search(data, 2)
    while found is not None and found[0] != _END:
        scans += found[0] == _SCAN
        length = int.from_bytes(data[found.end() : found.end() + 2], "big")
        found = _MARKER.search(data, found.end() + length)
    return scans


@contextmanager
def _pixel_limit(max_pixels: int) -> Iterator[None]:
    """Set Pillow's limit for decompression bombs, and silence its warnings in workers.

    Pillow raises above twice ``MAX_IMAGE_PIXELS`` and warns above it.
    """
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = (max_pixels + 1) // 2
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image (no known header)"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
