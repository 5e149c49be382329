"""Images with any number of channels and any numeric type."""

from __future__ import annotations

import glob
import io
import os
from dataclasses import dataclass

import numpy as np
from PIL import Image

from selftask.config.fields import setting
from selftask.data.reading.files import POLICY, read_bytes
from selftask.data.reading.patterns import fixed_folder, is_pattern, match_files
from selftask.data.source import Source
from selftask.data.sources.files import LabeledByFolder
from selftask.errors import BadImage, UserError, nearest, require
from selftask.files.paths import is_folder
from selftask.registry import register_source

EXTENSIONS = (".npy", ".npz", ".tif", ".tiff")
PNG = ".png"  # read only if there are no arrays: previews often lie beside them
MAX_TRIED = 20  # number of first files of which one must be readable


@register_source("bands")
class Bands(LabeledByFolder):
    """Arrays of any number of channels in .npy, .npz and .tif files, or .png, as 8-bit images."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        path: str
        """Folder, which is searched at any depth, or a pattern of paths."""
        bands: list[int] | None = setting(None, min=0)
        """Indices of the channels to read, from 0, in this order; null: all."""
        value_range: list[float] | None = None
        """Values that are mapped to 0 and 255, [lowest, highest]; null: the files hold uint8."""
        key: str | None = None
        """Key of the array in a .npz file; null: its first array."""
        labels: bool = True
        """Whether top folders are used as labels, if there are several."""

    def __init__(self, config: Config) -> None:
        if config.bands is not None and min(config.bands, default=-1) < 0:
            raise UserError(f"data.bands={config.bands}: numbers of channels, from 0, are expected")
        span = config.value_range
        if span is not None and (len(span) != 2 or not span[0] < span[1]):
            raise UserError(f"data.value_range={span}: [lowest, highest] is expected")
        self.value_range, self.key = span, config.key
        self.root, names = _find(os.path.expanduser(config.path))
        self._take_names(names, labels=config.labels)
        self._unreadable = {}  # found when files are read
        if any(path.lower().endswith((".tif", ".tiff")) for path in names):
            require("tifffile", "data", "TIFF files of many channels")
        self.bands = self._check_first(config.bands)
        self.takes_all = config.bands is None
        self.channels = len(self.bands)

    hash_names = Source.hash_names

    def _check_first(self, bands: list[int] | None) -> list[int]:
        """Return the channels to read, and check the config with the first readable file.

        Raises:
            UserError: If no file can be read, or the config would make every image unreadable.
        """
        name, array = self._first_readable()
        channels = array.shape[2]
        if bands is not None and max(bands) >= channels:
            raise UserError(
                f"data.bands={bands}: {name} has {channels} channels, from 0 to {channels - 1}"
            )
        if array.dtype != np.uint8 and self.value_range is None:
            low, high = np.nanmin(array), np.nanmax(array)
            raise UserError(
                f"data.value_range is missing: {name} holds {array.dtype}, {low:g} to {high:g}; "
                "say which values become 0 and 255 in every image: data.value_range=[LOW,HIGH]"
            )
        return list(range(channels)) if bands is None else bands

    def _first_readable(self) -> tuple[str, np.ndarray]:
        bad: list[BadImage] = []
        for index in range(min(len(self), MAX_TRIED)):
            path = self.path(index)
            try:
                return path, self._array(read_bytes(path), path)
            except BadImage as error:
                bad.append(error)
        raise UserError(f"data.path: none of the first {len(bad)} files can be read: {bad[0]}")

    def decode(self, data: bytes, path: str) -> np.ndarray:
        array = self._array(data, path)
        channels = array.shape[2]
        if self.takes_all and channels != self.channels:
            reason = f"it has {channels} channels, and the first file {self.channels}"
            raise BadImage(path, f"{reason}; data.bands says which to take")
        if max(self.bands) >= channels:
            raise BadImage(path, f"it has {channels} channels only")
        taken = array if self.takes_all else array[..., self.bands]
        return np.ascontiguousarray(_to_8_bit(taken, self.value_range))

    def _array(self, data: bytes, path: str) -> np.ndarray:
        """Return all channels of a file, (H, W, C); raises BadImage."""
        try:
            array = _channels_last(self._load(data, path))
        except MemoryError:
            raise
        except Exception as error:  # decoders may raise any error on damaged data
            raise BadImage(path, str(error) or type(error).__name__) from error
        if array.shape[0] * array.shape[1] > POLICY.max_pixels:
            size = f"{array.shape[1]}x{array.shape[0]}"
            raise BadImage(path, f"{size} pixels, more than data.max_pixels={POLICY.max_pixels}")
        return array

    def _load(self, data: bytes, path: str) -> np.ndarray:
        if path.lower().endswith((".tif", ".tiff")):
            import tifffile

            return np.asarray(tifffile.imread(io.BytesIO(data)))
        if path.lower().endswith(PNG):
            return _load_png(data)
        loaded = np.load(io.BytesIO(data), allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        key = loaded.files[0] if self.key is None else self.key
        if key not in loaded:
            hint = nearest(key, loaded.files)
            raise ValueError(f"no array data.key={key!r} in it; {hint}")
        return loaded[key]

    def describe(self) -> str:
        """Return a line such as ``27000 images, channels 3, 2, 1, no labels``."""
        listed = ", ".join(map(str, self.bands))
        taken = f"all {self.channels} channels" if self.takes_all else f"channels {listed}"
        return f"{len(self)} images, {taken}, {self.describe_labels()}"


def _find(path: str) -> tuple[str, list[str]]:
    """Return the top folder, and the sorted relative paths of its arrays; raises UserError."""
    if is_folder(path) or not is_pattern(path):
        root, pattern = path, f"{glob.escape(path)}/**/*"
    else:
        root, pattern = fixed_folder(path), path
    if not is_folder(root):
        raise UserError(f"data.path: there is no folder {root}")
    files = match_files(pattern)
    names = [name for name in files if name.lower().endswith(EXTENSIONS)]
    names = names or [name for name in files if name.lower().endswith(PNG)]
    if not names:
        raise UserError(
            f"data.path: no arrays (looked for {' '.join((*EXTENSIONS, PNG))}) in {path}"
        )
    return root, [os.path.relpath(name, root) for name in names]


def _load_png(data: bytes) -> np.ndarray:
    """Return the values of a PNG file, gray ones of 16 bits as uint16; raises ValueError."""
    with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
        if image.width * image.height > POLICY.max_pixels:
            raise ValueError(f"{image.width}x{image.height} pixels, more than data.max_pixels")
        if image.mode != "I;16" and any(";16" in str(tile[3]) for tile in image.tile):
            raise ValueError(
                "a PNG file with 16 bits per color, of which Pillow reads 8: convert it to TIFF"
            )
        return np.asarray(image.convert("RGB") if image.mode in ("1", "P") else image)


def _channels_last(array: np.ndarray) -> np.ndarray:
    """Convert an array to (H, W, C); (C, H, W) is assumed if its first side is the smallest.

    Raises ValueError for another number of dimensions.
    """
    if array.ndim == 2:
        return array[..., None]
    if array.ndim != 3:
        raise ValueError(f"an array of shape {array.shape} is not an image")
    return np.moveaxis(array, 0, -1) if array.shape[0] < min(array.shape[1:]) else array


def _to_8_bit(array: np.ndarray, value_range: list[float] | None) -> np.ndarray:
    """Scale to uint8; values outside the range are clipped, NaN becomes 0.

    Without a range, uint8 is returned unchanged; other types raise ValueError.
    """
    if value_range is None:
        if array.dtype != np.uint8:
            raise ValueError(f"{array.dtype} needs data.value_range")
        return array
    low, high = value_range
    scaled = (array.astype(np.float32) - np.float32(low)) * np.float32(255 / (high - low))
    scaled = np.nan_to_num(scaled, nan=0.0, posinf=255.0, neginf=0.0)
    return np.rint(np.clip(scaled, 0, 255)).astype(np.uint8)
