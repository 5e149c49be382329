"""Folders of images with masks of class indices.

``DIR/images`` has images, also in sub-folders. ``DIR/masks`` has a PNG of the same name for each
image, of 8 or 16 bits, palette or gray. ``DIR/classes.csv`` may name the classes, with columns
``index`` and ``name``. Images are resized to S x S pixels; C classes.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from PIL import Image

from selftask.data.reading.files import open_regular, read_bytes
from selftask.data.reading.image import orientation, reason_of
from selftask.data.source import ExtraKind, Source
from selftask.data.transforms.resampling import resize
from selftask.distributed.heartbeat import track
from selftask.errors import BadImage, UserError, join_some, nearest_path
from selftask.evaluate.dense.patches import Squared
from selftask.evaluate.tables import read_rows
from selftask.files.addresses import is_remote
from selftask.files.paths import exists, is_file, is_folder
from selftask.logs.stages import staged

IMAGES, MASKS, TABLE = "images", "masks", "classes.csv"
IGNORED = -1  # class number of pixels that do not count
_MOST = 1 << 16  # indices of a mask of 16 bits
_MOST_CLASSES = 1 << 15  # class numbers are int16
_MODES = ("1", "L", "P", "I;16", "I")
_THREADS = 8


@dataclass(frozen=True)
class Classes:
    """Classes of a data set, numbered from 0 in ascending order of their indices in the masks."""

    indices: Sequence[int]
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.indices)

    def numbers(self) -> np.ndarray:
        """Return the class number by mask index, int16 (65536,); IGNORED for other indices."""
        numbers = np.full(_MOST, IGNORED, dtype=np.int16)
        numbers[list(self.indices)] = np.arange(len(self), dtype=np.int16)
        return numbers


class MaskedImages(Squared):
    """Square images with the extra array ``mask``, int16 (S, S): class numbers or IGNORED.

    Masks are resized by nearest-neighbor interpolation.
    """

    extras: Mapping[str, ExtraKind] = MappingProxyType({"mask": "array"})

    def __init__(self, source: Source, size: int, masks: Sequence[str], classes: Classes) -> None:
        super().__init__(source, size)
        self.masks, self._numbers = masks, classes.numbers()

    def extra(self, index: int, name: str) -> np.ndarray:
        mask = self._numbers[read_mask(self.masks[index])]
        return resize(mask[..., None], self.size, self.size, "nearest")[..., 0]

    def extra_path(self, index: int, name: str) -> str:
        return self.masks[index]


class MaskFolder:
    """Images and masks of a folder. All masks are read once to check them and count pixels.

    Args:
        root: Folder with ``images`` and ``masks``.
        source: Source of the images below ``root/images``, or of some of them.
        key: Config key of the folder, for messages.
        ignore: Values in the masks whose pixels do not count.
        table: Name of each index; None if any index is a class.

    Attributes:
        pixels: Number of pixels of each index that counts.

    Raises:
        UserError: If a mask is missing or unreadable, differs in size from its image, or has an
            index that is not in the table, or if no pixel counts.
    """

    def __init__(
        self,
        root: str,
        source: Source,
        key: str,
        *,
        ignore: Collection[int],
        table: Mapping[int, str] | None,
    ) -> None:
        self.source, self.key = source, key
        self.masks = companions(root, source, key, MASKS, (".png",))
        self.pixels = self._count(ignore, table)
        if not self.pixels:
            raise UserError(
                f"{key}: the masks have no pixel that counts (ignore={list(ignore)}); pixels of a "
                "class are expected"
            )

    def _count(self, ignore: Collection[int], table: Mapping[int, str] | None) -> Counter[int]:
        allowed = None if table is None else {*table, *ignore}

        def count(index: int) -> Counter[int]:
            mask = read_mask(self.masks[index])
            check_size(mask, self.masks[index], self.source.path(index))
            counts = np.bincount(mask.ravel())
            pixels = Counter({int(i): int(counts[i]) for i in np.flatnonzero(counts)})
            if allowed is not None and (unknown := sorted(pixels.keys() - allowed)):
                raise UserError(
                    f"{self.masks[index]}: index {unknown[0]} is not in {TABLE}, which has "
                    f"{join_some([str(i) for i in sorted(table or ())])}; add it, or leave it out "
                    f"by ignore=[{','.join(map(str, sorted({*ignore, unknown[0]})))}]"
                )
            return pixels

        total: Counter[int] = Counter()
        with ThreadPoolExecutor(max_workers=_THREADS) as pool:
            counts = pool.map(count, range(len(self.masks)))
            for counted in track("masks", staged("masks", counts, len(self.masks))):
                total += counted
        for index in ignore:
            total.pop(index, None)
        return total

    def open(self, size: int, classes: Classes) -> MaskedImages:
        """Return the images and masks, resized to ``size`` x ``size`` pixels."""
        return MaskedImages(self.source, size, self.masks, classes)


def companions(
    root: str, source: Source, key: str, folder: str, suffixes: Sequence[str]
) -> list[str]:
    """Return for each image the path of the file of the same name in ``root/folder``.

    Args:
        root: Folder with ``images`` and ``folder``.
        source: Source of the images below ``root/images``.
        key: Config key of the folder, for messages.
        folder: Name of the folder of these files, such as ``masks``.
        suffixes: Possible extensions of the files.

    Raises:
        UserError: If there is no such file for an image.
    """
    files: list[str] = []
    missing: list[str] = []
    for index in range(len(source)):
        name = os.path.splitext(os.path.relpath(source.path(index), images_in(root)))[0]
        stem = os.path.join(os.path.expanduser(root), folder, name)
        paths = [stem + suffix for suffix in suffixes]
        path = next(filter(exists, paths), None)
        (missing if path is None else files).append(path or paths[0])
    if missing:
        raise UserError(
            f"{key}: {len(missing)} of {len(source)} images have no file in {folder!r}, such as "
            f"{missing[0]}; {nearest_path(missing[0])}"
        )
    return files


def folder_problem(root: str, second: str = MASKS, example: str = "NAME.png") -> str | None:
    """Return a message if a folder of images with masks is incomplete, else None.

    Args:
        root: The folder.
        second: Name of the folder with the masks or other files, next to the folder of images.
        example: Name of a file in it.
    """
    if is_remote(root):
        return f"{root} is an address; a local folder is expected"
    for name in (IMAGES, second):
        folder = Path(root).expanduser() / name
        if not is_folder(folder):
            return (
                f"there is no folder {name!r} in {root}; {IMAGES}/NAME.jpg and {second}/{example} "
                f"are expected; {nearest_path(folder)}"
            )
    return None


def images_in(root: str) -> str:
    """Return the folder of the images in a folder of images with masks."""
    return os.path.join(os.path.expanduser(root), IMAGES)


def read_table(root: str) -> dict[int, str] | None:
    """Return the names of the classes by index in ``root/classes.csv``; None if there is none.

    Raises:
        UserError: If the file is not a table of indices and names.
    """
    path = Path(root).expanduser() / TABLE
    if not is_file(path):
        return None
    table: dict[int, str] = {}
    for line, row in enumerate(read_rows(path, ("index", "name"), str(path)), start=2):
        text = row["index"] or ""
        if not text.strip().isdecimal() or not int(text) < _MOST:
            raise UserError(f"{path}:{line}: index {text!r}; a number from 0 to {_MOST - 1}")
        if int(text) in table:
            raise UserError(f"{path}:{line}: index {text} is in the table twice")
        table[int(text)] = row["name"] or text
    return table


def classes_of(
    table: Mapping[int, str] | None, ignore: Collection[int], *pixels: Mapping[int, int]
) -> Classes:
    """Return the classes of the table, or of all indices with pixels, except ignored ones.

    Raises:
        UserError: If there are more than 32,768 classes.
    """
    indices = sorted({index for part in pixels for index in part} if table is None else {*table})
    indices = [index for index in indices if index not in ignore]
    if len(indices) > _MOST_CLASSES:
        raise UserError(
            f"{len(indices):,} indices of classes; at most {_MOST_CLASSES:,} are possible. Do the "
            "masks have the index of the class of each pixel, and not depths or numbers of objects?"
        )
    return Classes(indices, [str(i) if table is None else table[i] for i in indices])


def read_mask(path: str) -> np.ndarray:
    """Read a mask: the index of the class of each pixel, uint16 (H, W).

    Raises:
        UserError: If the file cannot be read, or is not an image of class indices.
    """
    try:
        with Image.open(io.BytesIO(read_bytes(path))) as image:
            if image.mode not in _MODES:
                raise UserError(
                    f"{path}: has mode {image.mode}; a mask has one channel, the index of the "
                    "class of each pixel (PNG of 8 or 16 bits)"
                )
            mask = np.asarray(image)
    except (BadImage, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = error.reason if isinstance(error, BadImage) else reason_of(error)
        raise UserError(f"{path}: the mask cannot be read: {reason}") from error
    if mask.dtype.itemsize > 2 and not (mask.min() >= 0 and mask.max() < _MOST):
        raise UserError(f"{path}: has indices outside of 0 to {_MOST - 1}")
    return mask.astype(np.uint16)


def check_size(mask: np.ndarray, path: str, image_path: str) -> None:
    """Raise UserError if a mask differs in size from its image.

    Remote and unreadable images are not checked.

    Args:
        mask: Mask or depth map (H, W).
        path: Its path, for the message.
        image_path: Path of the image.
    """
    if is_remote(image_path):
        return
    try:
        with open_regular(image_path) as file, Image.open(file) as image:
            width, height = image.size[:: -1 if orientation(image) > 4 else 1]
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return  # skipped when it is read
    if mask.shape != (height, width):
        raise UserError(
            f"{path}: has {mask.shape[1]}x{mask.shape[0]} pixels, and {image_path} has "
            f"{width}x{height}; both must have the same size"
        )
