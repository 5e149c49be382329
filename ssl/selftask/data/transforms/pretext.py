"""Transforms for pretext tasks: rotations, jigsaw puzzles, tiles, channel drop.

What was drawn is a label, which the image alone does not carry into the loss. It is drawn at a
fixed place of the view's stream, whatever else the pipeline draws, so that ``drawn_rotation`` and
``drawn_permutation`` compute it from the seed, the ``key`` of the sample and the view. A method
that wants every rotation of every image needs no draw: one group of views for each,
``{name: rotate_90, k: [1]}``; the group is the label.

OpenCV's and NumPy's forms stay beside the device engine's torch forms, which cost fifteen to
seventy times as much for one image: microseconds of CPU time at 224x224 pixels, one thread (OpenCV,
torch): rotate_90 12, 469; jigsaw 15, 1127; channel_drop 28, 410 (``python
tools/bench/transform_forms.py``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, NamedTuple

import cv2
import numpy as np

from selftask.config.fields import setting
from selftask.data.transforms.channels import by_groups
from selftask.data.transforms.crops import Box
from selftask.data.transforms.transform import Matrix, Transform
from selftask.errors import UserError
from selftask.random.views import draw_at, draw_rng
from selftask.registry import register_transform

ROTATION, PERMUTATION = 1 << 63, (1 << 63) + 1  # blocks of a stream beyond all other draws
CANDIDATES = 20_000  # permutations to choose from, if there are more
_ROTATIONS = {
    1: cv2.ROTATE_90_COUNTERCLOCKWISE,
    2: cv2.ROTATE_180,
    3: cv2.ROTATE_90_CLOCKWISE,
}


@register_transform("rotate_90")
@dataclass(frozen=True, kw_only=True)
class Rotate90(Transform):
    """Rotate anticlockwise by a random number of quarters (RotNet, arXiv:1803.07728).

    An odd number swaps height and width: crop to a square before.
    """

    k: list[int] = field(default_factory=lambda: [0, 1, 2, 3])
    """Quarter turns, of which one is drawn."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if not self.k or not set(self.k) <= {0, 1, 2, 3}:
            yield f"k: {self.k}; a list of some of 0, 1, 2 and 3 is expected"

    def draw(self, rng: np.random.Generator, height: int, width: int) -> int | None:
        """Quarters of a turn."""
        return self.k[int(draw_at(rng, ROTATION) * len(self.k))] or None

    def apply(self, image: np.ndarray, params: int) -> np.ndarray:
        return by_groups(lambda part: cv2.rotate(part, _ROTATIONS[params]), image)

    def source_matrix(self, params: int, height: int, width: int) -> Matrix:
        if params == 1:
            return 0.0, -1.0, width, 1.0, 0.0, 0.0
        if params == 2:
            return -1.0, 0.0, width, 0.0, -1.0, height
        return 0.0, 1.0, 0.0, -1.0, 0.0, height

    def numbers(self, params: int | None) -> Sequence[float]:
        """Quarters of a turn."""
        return (float(params or 0),)


def drawn_rotation(
    seed: int, epoch: int, index: int, view: int, turns: Sequence[int] = (0, 1, 2, 3)
) -> int:
    """Return the quarters that ``rotate_90`` drew for a view, 0 to 3.

    ``view`` counts all views of an image from 0, ``epoch`` and ``index`` are those of the key.
    """
    return turns[int(draw_at(draw_rng(seed, epoch, index, view), ROTATION) * len(turns))]


class Puzzle(NamedTuple):
    """Parameters of ``jigsaw``."""

    permutation: int  # index into ``permutations``
    left: np.ndarray  # (T,) where each tile begins in its cell, in pixels
    top: np.ndarray


@register_transform("jigsaw")
@dataclass(frozen=True, kw_only=True)
class Jigsaw(Transform):
    """A jigsaw puzzle: tiles of the image in a random order (arXiv:1603.09246).

    The image is divided into cells, a tile is cut out of each at a random place, so that edges do
    not show what belongs together, and the tiles are laid out again without gaps. In the place of
    number k, counted row by row, is the tile of number ``permutations(...)[drawn][k]``.
    """

    resizes = "tiles"

    affine: ClassVar[bool] = False

    grid: int = setting(3, min=2, max=15)
    """Tiles in a row and in a column."""
    tile: int | None = setting(None, min=1)
    """Side of a tile, in pixels; null: as large as a cell."""
    num_permutations: int = setting(100, min=1)
    """Number of permutations, of which one is drawn."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        most = 24 if self.grid == 2 else 10_000
        if self.num_permutations > most:
            yield f"num_permutations: {self.num_permutations}; 1 to {most} is expected"

    def draw(self, rng: np.random.Generator, height: int, width: int) -> Puzzle:
        rows, columns = tile_size(height, width, self.grid, self.tile)
        number = int(draw_at(rng, PERMUTATION) * self.num_permutations)
        left, top = rng.random((2, self.grid**2))
        return Puzzle(
            number,
            (left * (width // self.grid - columns + 1)).astype(int),
            (top * (height // self.grid - rows + 1)).astype(int),
        )

    def apply(self, image: np.ndarray, params: Puzzle) -> np.ndarray:
        height, width = image.shape[:2]
        cell = height // self.grid, width // self.grid
        rows, columns = tile_size(height, width, self.grid, self.tile)
        size = self.grid * rows, self.grid * columns, image.shape[2]
        puzzle = np.empty(size, dtype=np.uint8)
        order = permutations(self.grid**2, self.num_permutations)[params.permutation]
        for place, tile in enumerate(order.tolist()):
            down, across = divmod(tile, self.grid)
            top, left = down * cell[0] + params.top[tile], across * cell[1] + params.left[tile]
            down, across = divmod(place, self.grid)
            puzzle[down * rows : (down + 1) * rows, across * columns : (across + 1) * columns] = (
                image[top : top + rows, left : left + columns]
            )
        return puzzle

    def numbers(self, params: Puzzle | None) -> Sequence[float]:
        """The number of the tile at each place of the puzzle, row by row."""
        if params is None:
            return (math.nan,) * self.grid**2
        orders = permutations(self.grid**2, self.num_permutations)
        return [float(tile) for tile in orders[params.permutation]]


def tile_size(height: int, width: int, grid: int, side: int | None) -> tuple[int, int]:
    """Return height and width of the tiles of an image of that size.

    Args:
        height: Of the image, in pixels.
        width: Of the image, in pixels.
        grid: Cells in a row and in a column.
        side: Of a tile, in pixels; None: tiles are as large as their cells.

    Raises:
        UserError: The cells are smaller than a tile.
    """
    cell = height // grid, width // grid
    size = cell if side is None else (side, side)
    if min(size) < 1 or size[0] > cell[0] or size[1] > cell[1]:
        raise UserError(
            f"an image of {width}x{height} pixels has cells of {cell[1]}x{cell[0]} in a grid of "
            f"{grid}, too small for tiles of {side or 1}; take larger crops"
        )
    return size


@register_transform("tile")
@dataclass(frozen=True, kw_only=True)
class Tile(Transform):
    """One tile of the image: view number k of the group shows cell number k of a grid.

    Cells are counted row by row, again from 0 after the last one. The tile lies at a random place
    in its cell. Use it in a group that is made from another one, so that all tiles are of one crop.
    """

    resizes = "square"

    view_number: ClassVar[int] = 0  # of its group; set with the view

    grid: int = setting(3, min=2, max=15)
    """Cells in a row and in a column."""
    size: int | None = setting(None, min=1)
    """Side of a tile, in pixels; null: as large as a cell."""

    def draw(self, rng: np.random.Generator, height: int, width: int) -> Box:
        rows, columns = tile_size(height, width, self.grid, self.size)
        down, across = divmod(self.view_number % self.grid**2, self.grid)
        of_top, of_left = rng.random(2).tolist()
        top = down * (height // self.grid) + int(of_top * (height // self.grid - rows + 1))
        left = across * (width // self.grid) + int(of_left * (width // self.grid - columns + 1))
        return left, top, left + columns, top + rows

    def apply(self, image: np.ndarray, params: Box) -> np.ndarray:
        left, top, right, bottom = params
        return np.ascontiguousarray(image[top:bottom, left:right])

    def source_matrix(self, params: Box, height: int, width: int) -> Matrix:
        return 1.0, 0.0, params[0], 0.0, 1.0, params[1]

    def numbers(self, params: Box | None) -> Sequence[float]:
        """Left, top, right and bottom in pixels of the image that is cut."""
        return params or (math.nan,) * 4


def drawn_permutation(
    seed: int, epoch: int, index: int, view: int, num_permutations: int = 100
) -> int:
    """Return the number of the permutation that ``jigsaw`` drew for a view."""
    return int(draw_at(draw_rng(seed, epoch, index, view), PERMUTATION) * num_permutations)


@cache
def permutations(num_tiles: int, count: int) -> np.ndarray:
    """Return permutations that differ as much as possible, uint8 (count, num_tiles).

    Each next one has the largest least Hamming distance to those before, of all permutations or of
    ``CANDIDATES`` random ones.
    """
    if math.factorial(num_tiles) <= CANDIDATES:
        listed = list(itertools.permutations(range(num_tiles)))
        candidates = np.array(listed, dtype=np.uint8).T
    else:
        draws = np.random.Generator(np.random.Philox(key=num_tiles))
        shuffled = np.argsort(draws.random((CANDIDATES, num_tiles)), axis=1)
        candidates = np.unique(shuffled, axis=0).astype(np.uint8).T
    candidates = np.ascontiguousarray(candidates)  # (T, N): numpy then compares along N
    least = np.full(candidates.shape[1], num_tiles + 1)
    chosen = []
    for _ in range(count):
        chosen.append(int(least.argmax()))
        distance = (candidates != candidates[:, chosen[-1], None]).sum(axis=0)
        np.minimum(least, distance, out=least)
    return np.ascontiguousarray(candidates[:, chosen].T)


@register_transform("channel_drop")
@dataclass(frozen=True, kw_only=True)
class ChannelDrop(Transform):
    """Overwrite all but some random channels, with probability p.

    Prevents learning from chromatic aberration where patches lie (arXiv:1505.05192).
    """

    keep: int = setting(1, min=1)
    """Channels to keep, fewer than there are."""
    fill: int = setting(0, min=0, max=255)
    """Gray level of the other channels."""
    p: float = setting(0.5, min=0, max=1)
    """Probability that the transform is applied."""

    def channel_problems(self, channels: int) -> Iterator[str]:
        if self.keep >= channels:
            yield f"keep: {self.keep}; the data have {channels}, and less than that is expected"

    def draw(self, rng: np.random.Generator, height: int, width: int) -> np.ndarray | None:
        """The overwritten channels."""
        chance, *draws = rng.random(1 + self.channels).tolist()
        return np.argsort(draws)[self.keep :] if chance < self.p else None

    def apply(self, image: np.ndarray, params: np.ndarray) -> np.ndarray:
        changed = image.copy()
        changed[..., params] = self.fill
        return changed
