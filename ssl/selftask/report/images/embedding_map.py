"""Map of the embeddings as SVG; ``map.js`` adds thumbnails, zoom and keyboard control."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from selftask.report.images.gather import Gathered
from selftask.report.images.sprite import Sprite, image_section
from selftask.report.page import Section, json_data, render

ID = "map-of-embeddings"
BUDGET = 1_300_000  # largest size of the thumbnails, in characters
MOST_POINTS = 2000
_SIDE = 64
_WIDTH, _HEIGHT, _MARGIN = 640, 520, 14  # size of the drawing
_COLORS = 8  # colors in the style sheet: .c0 ... .c7, besides .other
_SHAPES = (
    "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0z",  # circle
    "M-3.2-3.2h6.4v6.4h-6.4z",  # square
    "M0-4.4L4.1 3.1H-4.1z",  # triangle
    "M0-4.6L4.6 0 0 4.6-4.6 0z",  # diamond
)


@dataclass(frozen=True)
class Projection:
    """Positions (N, 2) of the images from one method, and labels of its axes."""

    title: str
    positions: np.ndarray
    axes: tuple[str, str] = ("", "")


def map_section(images: Gathered, projections: Mapping[str, Projection]) -> Section:
    """Return the section with the map; the first projection is shown first.

    Each class has its own combination of color and shape. If there are too many classes, the less
    frequent ones share a combination.
    """
    sprite = Sprite("spot", _SIDE, BUDGET)
    tiles = [sprite.tile(sprite.add(pixels)) for pixels in images.thumbnails]
    marks = _marks(images)
    places = {key: _scaled(one.positions) for key, one in projections.items()}
    first = next(iter(projections))
    data = {
        "width": _WIDTH,
        "height": _HEIGHT,
        "places": {key: positions.ravel().tolist() for key, positions in places.items()},
        "axes": {key: one.axes for key, one in projections.items()},
        "names": list(images.names),
        "labels": [images.label_text(row) for row in range(len(images))],
        "tiles": [list(tile) for tile in tiles],
    }
    kinds = [_kind(marks.get(label)) for label in images.labels.tolist()]
    html = render(
        "images.map",
        images,
        projections,
        projections[first].axes,
        (_WIDTH, _HEIGHT),
        _SHAPES,
        list(zip(kinds, places[first].tolist(), strict=True)),
        list(_legend(images, marks)),
    )
    html = f"{html}{json_data(data, 'map-data')}"
    return image_section("Map of the embeddings", html, ID, sprite)


def _marks(images: Gathered) -> dict[int, int]:
    """Return the number of the mark (color and shape) of each class that has its own."""
    counts = Counter(images.labels[images.labels >= 0].tolist())
    frequent = sorted(label for label, _ in counts.most_common(_COLORS * len(_SHAPES)))
    return {label: number for number, label in enumerate(frequent)}


def _kind(mark: int | None) -> tuple[str, str]:
    """Return CSS class and shape reference of a mark; None is the mark of all other images."""
    if mark is None:
        return "other", "#shape-0"
    shape = (mark + mark // _COLORS) % len(_SHAPES)  # successive marks differ in color and shape
    return f"c{mark % _COLORS}", f"#shape-{shape}"


def _scaled(positions: np.ndarray) -> np.ndarray:
    """Return positions (N, 2) in the drawing, with y upwards and equal scales on both axes."""
    low, high = positions.min(axis=0), positions.max(axis=0)
    room = np.array([_WIDTH, _HEIGHT]) - 2 * _MARGIN
    scale = float((room / np.maximum(high - low, 1e-12)).min())
    centered = (positions - (low + high) / 2) * scale
    return np.round(centered * [1, -1] + np.array([_WIDTH, _HEIGHT]) / 2, 1)


def _legend(images: Gathered, marks: dict[int, int]) -> Iterator[tuple[tuple[str, str], str, int]]:
    """Yield mark, name and number of images of each class, for a button that highlights them."""
    labels = images.labels.tolist()
    counts = Counter(marks.get(label) for label in labels)
    names: dict[int | None, str] = {mark: images.class_text(label) for label, mark in marks.items()}
    if not marks:
        return
    others = len({label for label in labels if label not in marks})
    names[None] = "no label" if set(labels) - set(marks) == {-1} else f"{others} other classes"
    for mark, name in names.items():
        if counts[mark]:
            yield _kind(mark), name, counts[mark]
