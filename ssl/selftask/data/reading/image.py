"""Reading of image files as upright 8-bit RGB, and conversion of arrays to 8-bit images."""

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
    check_size,
    in_time,
    is_transient,
    open_regular,
    read_bytes,
)
from selftask.errors import BadImage

_ORIENTATION_TAG = 0x0112
_JPEG = b"\xff\xd8\xff"
_NPY = b"\x93NUMPY"
_SCAN = b"\xff\xda"  # begins each scan of a JPEG
_PIECE = 1 << 24  # bytes searched at once
_END = b"\xff\xd9"
_MARKER = re.compile(rb"\xff[\x02-\xcf\xd8-\xfe]")  # of a segment, or the end of the image
_JPEG_SPACES = ("YCbCr", "RGB", "Gray")  # other color spaces are left to Pillow
_SHORT = 65_536  # bytes that are searched faster than the first scan is found
_MAY_BE_TURNED = (b"Exif\0\0", b"tiff:Orientation")  # markers of blocks that hold an orientation


def read_image(path: str) -> np.ndarray:
    """Read a local or remote image file as upright RGB, uint8 (H, W, 3).

    The format is detected from the content, not from the name. For animations, only the first frame
    is read.

    Raises:
        BadImage: If it is not a regular file, it was not read in time, it exceeds
            ``data.max_bytes``, ``data.max_scans`` or ``data.max_pixels`` (checked before decoding),
            or it cannot be decoded completely.
    """
    return decode_image(read_bytes(path), path)


def decode_image(data: bytes, name: str) -> np.ndarray:
    """Decode the content of an image file to upright RGB, uint8 (H, W, 3).

    Args:
        data: Content of the file.
        name: Name of the image for messages.

    Raises:
        BadImage: If the image exceeds a limit or cannot be decoded, as in ``read_image``.
    """
    try:
        check_size(len(data))
        pixels = None
        if data.startswith(_JPEG):
            _refuse_scans(data)
            pixels = _decode_jpeg(data)
        return _decode_with_pillow(data) if pixels is None else pixels
    except MemoryError:
        raise
    except Exception as error:  # decoders may raise any error on damaged data
        raise BadImage(name, reason_of(error)) from error


def decode(data: bytes, name: str) -> np.ndarray:
    """Decode an image or .npy file to uint8 (H, W, 3); raises BadImage.

    Args:
        data: Encoded image, or content of a .npy file.
        name: Name of the image for messages.
    """
    if not data.startswith(_NPY):
        return decode_image(data, name)
    try:
        return from_array(np.load(io.BytesIO(data), allow_pickle=False))
    except (ValueError, EOFError, OSError) as error:
        raise BadImage(name, str(error)) from error


def image_of(array: np.ndarray, name: str, channels: int = 3) -> np.ndarray:
    """Convert an array to an image, uint8 (H, W, C); raises BadImage instead of ValueError.

    Args:
        array: As in ``from_array``.
        name: Name of the image for messages.
        channels: Number of channels of the result.
    """
    try:
        return from_array(array, channels)
    except ValueError as error:
        raise BadImage(name, str(error)) from error


def _decode_jpeg(data: bytes) -> np.ndarray | None:
    """Decode common JPEGs with libjpeg-turbo: the pixels are Pillow's, in half the time.

    Returns None for other or damaged files, which Pillow then decodes.
    """
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    _refuse_bomb((width, height))
    if space not in _JPEG_SPACES:
        return None
    try:
        pixels: np.ndarray = simplejpeg.decode_jpeg(data, "RGB")
    except ValueError:
        return None
    head = data if len(data) <= _SHORT else data[: _first_scan(data)]
    if any(mark in head for mark in _MAY_BE_TURNED):
        with Image.open(io.BytesIO(data)) as image:
            pixels = upright(pixels, orientation(image))
    return pixels


def _first_scan(data: bytes) -> int:
    """Return the position of a JPEG's first scan or end marker; its length if it has neither.

    All metadata comes before the first scan.
    """
    marker = _MARKER.search(data, 2)
    while marker is not None and marker[0] not in (_SCAN, _END):
        marker = _MARKER.search(data, _end_of_segment(data, marker))
    return len(data) if marker is None else marker.start()


def _end_of_segment(data: bytes, marker: re.Match[bytes]) -> int:
    return marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")


def _decode_with_pillow(data: bytes) -> np.ndarray:
    with _pixel_limit(), Image.open(io.BytesIO(data)) as image:
        _refuse_bomb(image.size)
        image.load()
        return upright(to_rgb(image), orientation(image))


def check_header(path: str) -> BadImage | None:
    """Return an error if the header of a local file is unreadable, else None; decodes no pixels.

    More pixels than ``data.max_pixels`` are also an error.
    """

    def open_header(path: str) -> None:
        with open_regular(path) as file, _pixel_limit(), Image.open(file) as image:
            _refuse_bomb(image.size)

    try:
        in_time(open_header, path, POLICY.timeout_s)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        return BadImage(path, reason_of(error), storage_failed=is_transient(error))
    return None


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an opened image; 1 (upright) if it is missing or damaged.

    Valid numbers are 1 to 8, but any integer in the file is returned.
    """
    try:
        number = image.getexif().get(_ORIENTATION_TAG)
    except (SyntaxError, ValueError, TypeError, KeyError, OSError, EOFError):
        return 1  # the pixels are intact
    return number if isinstance(number, int) else 1


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Apply the EXIF orientation to stored pixels (H, W, C); 5 to 8 swap height and width.

    Numbers other than 2 to 8 change nothing. The result is C-contiguous.
    """
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def to_rgb(image: Image.Image) -> np.ndarray:
    """Convert a Pillow image of any mode to uint8 (H, W, 3); alpha is dropped.

    Alpha and CMYK are handled by Pillow's ``convert("RGB")``, as in torchvision's image folders.
    Gray levels of more than 8 bits are scaled from [0, 65535], and floats as in ``from_array``.
    """
    if image.mode.startswith("I") or image.mode == "F":
        return _gray_to_rgb(_to_8_bit(np.asarray(image), deep=True))
    if image.mode in ("La", "RGBa"):  # Pillow converts these only through LA and RGBA
        image = image.convert(image.mode.upper())
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def from_array(array: np.ndarray, channels: int = 3) -> np.ndarray:
    """Convert an array of numbers to an image, uint8 (H, W, C).

    Floats are assumed to be in [0, 1], or in [0, 255] if one is above 1. Integers of 16 bits are
    assumed to be in [0, 65535]; other integers in [0, 255], or in [0, 65535] if one is above 255.
    Arrays with values outside these ranges are scaled by their own range. False and True become 0
    and 255. NaN and infinities count as 0. The result may share memory with ``array``.

    Args:
        array: For three channels: (H, W), (H, W, 1|3|4) or (1|3|4, H, W); a fourth channel is
            dropped. For other numbers of channels: (H, W, channels) or (channels, H, W); for one,
            also (H, W).
        channels: Number of channels of the result.

    Raises:
        ValueError: If the array has another shape, or no pixels.
    """
    if not array.size:
        raise ValueError(f"an array of shape {array.shape} has no pixels")
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


def as_pixels(image: Any, channels: int = 3) -> np.ndarray:
    """Convert a Pillow image, an array or a CPU tensor to uint8 (H, W, C).

    The EXIF orientation of a Pillow image is applied. Shapes and ranges of values of arrays and
    tensors are those of ``from_array``.

    Raises:
        ValueError: If it is not an image, or has another number of channels. Other errors of
            Pillow's decoders are raised unchanged.
    """
    if isinstance(image, Image.Image):
        pixels = to_rgb(image) if channels == 3 else from_array(np.asarray(image), channels)
        return upright(pixels, orientation(image))
    if hasattr(image, "detach"):  # a tensor; NumPy has neither gradients nor bfloat16
        image = image.detach()
        image = image.double() if image.is_floating_point() else image
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
        expected = f"{channels} channels" if channels > 1 else "1 channel"
        raise ValueError(f"an array of shape {array.shape} is not an image with {expected}")
    return np.ascontiguousarray(array if array.dtype == np.uint8 else _to_8_bit(array))


def _gray_to_rgb(gray: np.ndarray) -> np.ndarray:
    return np.repeat(gray[..., None], 3, axis=2)


def _to_8_bit(array: np.ndarray, *, deep: bool = False) -> np.ndarray:
    """Scale numbers to uint8; ``from_array`` describes the assumed ranges.

    Integers of a width other than 16 bits are assumed to be 8-bit values if all of them fit, unless
    ``deep`` is True: Pillow returns pixels of more than 8 bits as 32-bit integers.
    """
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    values = np.nan_to_num(array.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    is_float = np.issubdtype(array.dtype, np.floating)
    bytes_too = array.dtype.itemsize != 2 and not deep
    tops = (1.0, 255.0) if is_float else (255.0, 65535.0) if bytes_too else (65535.0,)
    full = next((top for top in tops if low >= 0 and high <= top), None)
    if full is None:  # no scale is declared: use the range of the values
        values, full = values - low, max(high - low, 1e-12)
    return np.rint(values * (255.0 / full)).astype(np.uint8)


def _refuse_bomb(size: tuple[int, int]) -> None:
    if size[0] * size[1] > POLICY.max_pixels:
        limit = f"data.max_pixels={POLICY.max_pixels}"
        raise ValueError(f"{size[0]}x{size[1]} pixels, more than {limit}")


def _refuse_scans(data: bytes) -> None:
    """Raise ValueError if a JPEG has too many scans; decoding takes one pass for each."""
    if _count_marks(data) <= POLICY.max_scans:
        return
    scans = _count_scans(data)
    if scans > POLICY.max_scans:
        raise ValueError(f"{scans} scans, more than data.max_scans={POLICY.max_scans}")


def _count_marks(data: bytes) -> int:
    """Count the occurrences of ``_SCAN``, an upper bound for the number of scans.

    Faster than ``data.count``.
    """
    values = np.frombuffer(data, np.uint8)
    pieces = (values[first : first + _PIECE + 1] for first in range(0, len(values), _PIECE))
    first, second = _SCAN
    return sum(int(np.count_nonzero((p[:-1] == first) & (p[1:] == second))) for p in pieces)


def _count_scans(data: bytes) -> int:
    """Count the scans of a JPEG up to its end marker, after which phones may append videos."""
    scans, marker = 0, _MARKER.search(data, 2)
    while marker is not None and marker[0] != _END:
        scans += marker[0] == _SCAN
        marker = _MARKER.search(data, _end_of_segment(data, marker))
    return scans


@contextmanager
def _pixel_limit() -> Iterator[None]:
    """Context manager that sets Pillow's limit for decompression bombs and silences warnings.

    Pillow warns above ``MAX_IMAGE_PIXELS`` and raises above twice as many.
    """
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = (POLICY.max_pixels + 1) // 2
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def reason_of(error: Exception) -> str:
    """Return a short message for an error raised while reading an image."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image (no known header)"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
