"""Reading one image file: whatever it is, an upright 8-bit RGB picture, or ``BadImage``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

MAX_PIXELS = 178_956_970  # what Pillow itself takes for a decompression bomb

_ORIENTATION_TAG = 0x0112
_UPRIGHT = {  # EXIF orientation -> what turns the stored picture upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class BadImage(Exception):
    """An image that cannot be read: its path (or name) and the reason, on one line."""

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = " ".join(reason.split())
        super().__init__(path, self.reason)

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def read_image(path: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode a file into an upright RGB image; the first frame of an animation.

    The content decides about the format, not the name. Raises BadImage for what cannot be
    decoded to its end and for what claims more than ``max_pixels`` (before decoding it).
    """
    try:
        with open(path, "rb") as file, _pixel_limit(max_pixels), Image.open(file) as image:
            _refuse_bomb(image.size, max_pixels)
            image.load()
            return to_rgb(upright(image))
    except MemoryError:
        raise
    except Exception as error:  # decoders raise anything at all on damaged data
        raise BadImage(path, _reason(error)) from error


def check_header(path: str, max_pixels: int = MAX_PIXELS) -> BadImage | None:
    """What is wrong with the header of a file, or None. Nothing is decoded: this is cheap."""
    try:
        with open(path, "rb") as file, _pixel_limit(max_pixels), Image.open(file) as image:
            _refuse_bomb(image.size, max_pixels)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        return BadImage(path, _reason(error))
    return None


def upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation of a loaded image. A damaged EXIF block counts as none."""
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)
    except (SyntaxError, ValueError, TypeError, KeyError, OSError, EOFError):
        return image  # the pixels are sound; only the note about them is not
    turn = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def to_rgb(image: Image.Image) -> Image.Image:
    """An 8-bit RGB image of any mode. Deeper ones are scaled, not clipped; alpha is dropped.

    Dropping alpha and the CMYK formula are Pillow's ``convert("RGB")``, which torchvision's
    image folders use too, so that figures stay comparable.
    """
    if image.mode == "RGB":
        return image.copy() if isinstance(image, ImageFile.ImageFile) else image
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_to_8_bit(np.asarray(image))).convert("RGB")
    if image.mode in ("La", "RGBa"):  # Pillow takes these back only through LA and RGBA
        image = image.convert(image.mode.upper())
    return image.convert("RGB")


def from_array(array: np.ndarray) -> Image.Image:
    """RGB image of an array (H, W), (H, W, 1|3|4) or (1|3|4, H, W): uint8, deeper, or float.

    Floats are taken to span [0, 1], or [0, 255] where they go beyond 1. Raises ValueError.
    """
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim != 2 and not (array.ndim == 3 and array.shape[-1] in (3, 4)):
        raise ValueError(f"an array of shape {array.shape} is no image with 1, 3 or 4 channels")
    if array.dtype != np.uint8:
        array = _to_8_bit(array)
    return Image.fromarray(np.ascontiguousarray(array)).convert("RGB")


def as_rgb(image: Any) -> Image.Image:
    """RGB image of what a data set may give: a Pillow image, an array, a torch tensor."""
    if isinstance(image, Image.Image):
        return to_rgb(upright(image))
    return from_array(np.asarray(image))


def _to_8_bit(array: np.ndarray) -> np.ndarray:
    """Scale integers by their 16 bits and floats by 1 or 255; anything wider by its own range."""
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    values = np.nan_to_num(array.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    is_float = np.issubdtype(array.dtype, np.floating)
    known = (1.0, 255.0) if is_float else (65535.0,)
    full = next((top for top in known if low >= 0 and high <= top), None)
    if full is None:  # no scale is declared anywhere: from the darkest to the brightest
        values, full = values - low, max(high - low, 1e-12)
    return np.rint(values * (255.0 / full)).astype(np.uint8)


def _refuse_bomb(size: tuple[int, int], max_pixels: int) -> None:
    if size[0] * size[1] > max_pixels:
        raise ValueError(f"{size[0]}x{size[1]} pixels, more than data.max_pixels={max_pixels}")


@contextmanager
def _pixel_limit(max_pixels: int) -> Iterator[None]:
    """Give Pillow's own bomb check our limit, and keep its warnings out of the workers' output.

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
