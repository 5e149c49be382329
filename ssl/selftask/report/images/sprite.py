"""Sections with a sprite sheet: thumbnails of many images in one embedded file of limited size."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps, features

from selftask.data.inspect.contact_sheet import as_seen, printable
from selftask.report.page import Section, static_text

GUTTER = 2  # pixels around a tile that repeat its edge, so that adjacent tiles do not bleed into it
_COLUMNS = 32  # tiles in a row
_BLOCK = 16  # block size of the codec in pixels; tiles begin at a block
_QUALITIES = (80, 65, 50, 35)
_SCALES = (0.75, 0.5, 0.33, 0.2)  # used if the image is too large even at the lowest quality
_MAX_SIDE = 16383  # largest side of a WebP image, in pixels


class Tile(NamedTuple):
    """Position and size of a thumbnail in its sheet, in pixels."""

    left: int
    top: int
    width: int
    height: int


class Sprite:
    """Collector of thumbnails, encoded as one image of at most ``budget`` characters.

    Equal images share a tile. Images keep their aspect ratio. Small images are enlarged by an
    integer factor, so that single pixels are visible.

    Args:
        name: CSS class of the tiles, with letters and hyphens only.
        side: Longest side of a thumbnail in pixels.
        budget: Largest number of characters of the data URI.
    """

    def __init__(self, name: str, side: int, budget: int) -> None:
        self.name, self.side, self.budget = name, side, budget
        self._pixels: list[np.ndarray] = []
        self._numbers: dict[bytes, int] = {}  # hash of a thumbnail -> number of its tile

    def add(self, image: np.ndarray) -> int:
        """Add an image, uint8 (H, W, C), and return the number of its tile."""
        pixels = thumbnail(image, self.side)
        digest = hashlib.blake2b(f"{pixels.shape}".encode() + pixels.tobytes()).digest()
        if digest not in self._numbers:
            self._numbers[digest] = len(self._pixels)
            self._pixels.append(pixels)
        return self._numbers[digest]

    def __len__(self) -> int:
        return len(self._pixels)

    def tile(self, number: int) -> Tile:
        """Return the position of a tile, which does not change when tiles are added."""
        row, column = divmod(number, _COLUMNS)
        height, width = self._pixels[number].shape[:2]
        return Tile(column * self._pitch + GUTTER, row * self._pitch + GUTTER, width, height)

    @property
    def _pitch(self) -> int:
        return -(-(self.side + 2 * GUTTER) // _BLOCK) * _BLOCK

    def css(self) -> str:
        """Return the CSS that shows the sheet in elements of class ``name``; empty if no tiles.

        Raises:
            ValueError: If the sheet does not fit into ``budget``.
        """
        if not self._pixels:
            return ""
        sheet = self._sheet()
        height, width = sheet.shape[:2]
        return (
            f".{self.name}{{background-image:url({encode(sheet, self.budget)});"
            f"background-size:{width}px {height}px}}"
        )

    def _sheet(self) -> np.ndarray:
        """Return one image (H, W, 3) with all thumbnails."""
        columns, rows = min(_COLUMNS, len(self)), -(-len(self) // _COLUMNS)
        sheet = np.full((rows * self._pitch, columns * self._pitch, 3), 128, dtype=np.uint8)
        padding = ((GUTTER, GUTTER), (GUTTER, GUTTER), (0, 0))
        for number, pixels in enumerate(self._pixels):
            padded = np.pad(pixels, padding, mode="edge")
            left, top = (corner - GUTTER for corner in self.tile(number)[:2])
            sheet[top : top + padded.shape[0], left : left + padded.shape[1]] = padded
        return sheet


def thumbnail(image: np.ndarray, side: int) -> np.ndarray:
    """Return an image uint8 (H, W, C) as RGB, with a longest side of at most ``side``.

    A small image is enlarged by an integer factor. If there are more than three channels, the first
    three are used. If there are one or two, the first is shown in gray.
    """
    seen = Image.fromarray(np.ascontiguousarray(as_seen(image))).convert("RGB")
    seen.thumbnail((side, side), Image.Resampling.LANCZOS, reducing_gap=None)
    times = max(1, side // max(seen.size))
    return np.asarray(seen).repeat(times, axis=0).repeat(times, axis=1)


def encode(pixels: np.ndarray, budget: int) -> str:
    """Encode an image, uint8 (H, W, 3), as a data URI of at most ``budget`` characters.

    A side longer than WebP allows is reduced to that. If the text is too long, the quality is
    reduced, and last the resolution.

    Raises:
        ValueError: If even the smallest version is too large.
    """
    image = Image.fromarray(pixels)
    if max(image.size) > _MAX_SIDE:
        image.thumbnail((_MAX_SIDE, _MAX_SIDE))
    attempts = [(1.0, quality) for quality in _QUALITIES]
    attempts += [(scale, _QUALITIES[-1]) for scale in _SCALES]
    for scale, quality in attempts:
        scaled = ImageOps.scale(image, scale, Image.Resampling.LANCZOS)
        uri = _data_uri(scaled, quality)
        if len(uri) <= budget:
            return uri
    raise ValueError(f"an image of {image.size} pixels does not fit into {budget} characters")


def _data_uri(image: Image.Image, quality: int) -> str:
    kind = "webp" if features.check("webp") else "jpeg"
    file = io.BytesIO()
    image.save(file, kind, quality=quality)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def image_section(title: str, html: str, id: str, sprite: Sprite | None = None) -> Section:
    """Return a section with the style sheet of images, its script and its sprite sheet.

    Args:
        title: Heading.
        html: Content.
        id: Anchor in the page, which also selects the script.
        sprite: Images that ``html`` shows, if any.
    """
    sheet = f"<style>{sprite.css()}</style>" if sprite is not None and len(sprite) else ""
    script = static_text("map.js") if id == "map-of-embeddings" else ""
    return Section(title, f"{sheet}{html}", id, script=script, style=static_text("images.css"))


def short_names(paths: Sequence[str]) -> list[str]:
    """Return paths as printable text, without the leading folders that all of them share.

    For rows of one file, such as ``table.csv:17``, only the row number remains.
    """
    parts = [path.split("/") for path in paths]
    shared = 0
    if len(parts) > 1:
        shortest = min(map(len, parts)) - 1
        while shared < shortest and len({part[shared] for part in parts}) == 1:
            shared += 1
    names = ["/".join(part[shared:]) for part in parts]
    files = {name.rpartition(":")[0] for name in names}  # table.csv:17 if all are in one file
    if len(names) > 1 and len(files) == 1:
        names = [name.rpartition(":")[2] for name in names]
    return [printable(name) for name in names]
