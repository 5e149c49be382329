"""Contact sheet: each row shows an image and its augmented views, before normalization."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from selftask.batch import Batch
from selftask.config.schema import Component, Config, ViewConfig, num_views
from selftask.data.data_module import DataModule
from selftask.data.loading.open_data import Sources
from selftask.data.transforms.normalize import Normalize
from selftask.distributed.world import World

MIN_SIDE = 96  # pixels; smaller views are enlarged by an integer factor
_LARGEST_ORIGINAL = 256
_GAP, _LINE, _TEXT = 8, 16, 13  # pixels: gap between images, height of a text line, font size
_PAPER, _INK = (228, 228, 228), (30, 30, 30)  # background (unlike most images), text


@dataclass(frozen=True)
class Row:
    """Image and its views."""

    name: str  # path, or name in the source
    original: np.ndarray  # uint8 (H, W, C)
    views: list[np.ndarray]  # V uint8 (h, w, C), before normalization
    index: int = -1  # index in the source


def rows_of(config: Config, sources: Sources, num_images: int) -> list[Row]:
    """Return the first images of epoch 0 and their views, augmented as in training.

    The views are taken from a batch as in training, and its normalization is undone. Unreadable
    images are replaced as in training, without a limit on their number.

    Args:
        config: Config of the run.
        sources: Opened data sources.
        num_images: Number of images; if the source has fewer, all of them.
    """
    batch = first_batch(config, sources, num_images)
    views = [
        to_pixels(view, config.views[name].transforms)
        for name, group in batch.views.items()
        for view in group
    ]
    return [
        Row(
            sources.train.path(index),
            sources.train[index][0],
            [view[number] for view in views],
            index,
        )
        for number, index in enumerate(batch.index.tolist())
    ]


def first_batch(config: Config, sources: Sources, num_images: int) -> Batch:
    """Return the first images of epoch 0 in one batch on the CPU, as read by training.

    Args:
        config: Config of the run.
        sources: Opened data sources.
        num_images: Number of images; if the source has fewer, all of them.
    """
    num_images = min(num_images, len(sources.train))
    with tempfile.TemporaryDirectory() as out:  # so that no list of bad files of a run is changed
        feed = DataModule(
            _for_one_batch(config, num_images, out), sources, World(), torch.device("cpu")
        )
        try:
            return next(feed.train_batches(0))
        finally:
            feed.close()


def view_names(views: Mapping[str, ViewConfig]) -> list[str]:
    """Return names such as ``global 1``, ``global 2``, ``local``, in the order of the views.

    Views are numbered only if their group has several.
    """
    return [
        f"{name} {number}" if count > 1 else name
        for name, count in num_views(views).items()
        for number in range(1, count + 1)
    ]


def _for_one_batch(config: Config, num_images: int, out: str) -> Config:
    return replace(
        config,
        out=out,
        data=replace(config.data, num_workers=0, cache="none", on_error="skip", max_unreadable=1.0),
        train=replace(config.train, batch_size=num_images, accumulate=1),
    )


def to_pixels(views: Tensor, transforms: Sequence[Component]) -> np.ndarray:
    """Undo the normalization of views and convert them to pixels.

    Args:
        views: Images as the network gets them, float32 (B, C, H, W).
        transforms: Transforms that made the views; the last one may be ``normalize``.

    Returns:
        uint8 (B, H, W, C).
    """
    last = transforms[-1] if transforms else None
    scale, shift = (
        Normalize(**last.args).scale_and_shift(views.shape[1])
        if last is not None and last.name == "normalize"
        else (np.float32(1 / 255), np.float32(0))
    )
    values = views.permute(0, 2, 3, 1).numpy()
    return np.rint((values - shift) / scale).clip(0, 255).astype(np.uint8)


def draw(rows: list[Row], names: list[str]) -> Image.Image:
    """Draw the sheet, an RGB image: a row for each image, with its name below.

    Args:
        rows: Images and views, at least one row.
        names: Heading of each view.
    """
    cells = [[_fit(row.original), *map(_enlarge, row.views)] for row in rows]
    widths = [max(cell.width for cell in column) for column in zip(*cells, strict=True)]
    heights = [max(cell.height for cell in row) for row in cells]
    headings = ["original", *names]
    font = ImageFont.load_default(size=_TEXT)
    widths = [max(w, int(font.getlength(h))) for w, h in zip(widths, headings, strict=True)]
    size = (
        sum(widths) + _GAP * (len(widths) + 1),
        sum(heights) + (_GAP + _LINE) * (len(rows) + 1) + _GAP,
    )
    sheet = Image.new("RGB", size, _PAPER)
    pen = ImageDraw.Draw(sheet)
    for left, heading in zip(_starts(widths), headings, strict=True):
        pen.text((left, _GAP), heading, fill=_INK, font=font)
    top = _GAP + _LINE + _GAP
    for row, row_cells, height in zip(rows, cells, heights, strict=True):
        for left, cell in zip(_starts(widths), row_cells, strict=True):
            sheet.paste(cell, (left, top))
        line = _shortened(printable(row.name), font, size[0] - 2 * _GAP)
        pen.text((_GAP, top + height), line, fill=_INK, font=font)
        top += height + _LINE + _GAP
    return sheet


def as_seen(image: np.ndarray) -> np.ndarray:
    """Return the first three channels of an image (H, W, C), or the first, (H, W), if C < 3."""
    return image[..., :3] if image.shape[2] >= 3 else image[..., 0]


def _starts(widths: list[int]) -> Iterator[int]:
    left = _GAP
    for width in widths:
        yield left
        left += width + _GAP


def _enlarge(view: np.ndarray) -> Image.Image:
    """Draw a view; small views are enlarged by an integer factor."""
    times = -(-MIN_SIDE // max(1, min(view.shape[:2])))
    return Image.fromarray(as_seen(view).repeat(times, axis=0).repeat(times, axis=1))


def _fit(original: np.ndarray) -> Image.Image:
    """Draw an image, shrunk to the largest size; small images are enlarged like views."""
    if max(original.shape[:2]) <= MIN_SIDE:
        return _enlarge(original)
    image = Image.fromarray(np.ascontiguousarray(as_seen(original)))
    image.thumbnail((_LARGEST_ORIGINAL, _LARGEST_ORIGINAL))
    return image


def printable(name: str) -> str:
    """Return the name with ``?`` in place of characters that cannot be printed."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def _shortened(name: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """Shorten a name that is too long for a line; its end is kept."""
    shown = name
    while font.getlength(shown) > width and len(shown) > 1:
        name = name[1:]
        shown = "..." + name
    return shown
