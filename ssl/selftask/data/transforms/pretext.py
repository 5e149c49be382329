"""Transforms for pretext tasks: rotations, jigsaw puzzles, tiles, channel drop.

The drawn rotation or permutation is the label of a view. It cannot be read from the image, so it is
drawn at a fixed position of the view's random stream, whatever else the pipeline draws.
``drawn_rotation`` and ``drawn_permutation`` compute it again from the seed, the ``key`` of the
sample and the view. A method that uses every rotation of every image needs no draw: it has one
group of views for each rotation, such as ``{name: rotate_90, k: [1]}``, and the group is the label.
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
from selftask.data.transforms.boxes import Box
from selftask.data.transforms.channels import by_groups
from selftask.data.transforms.transform import Matrix, Transform
from selftask.errors import UserError
from selftask.random.views import draw_at, draw_rng
from selftask.registry import register_transform

ROTATION, PERMUTATION = 1 << 63, (1 << 63) + 1  # blocks of a stream that no other draw uses
CANDIDATES = 20_000  # random permutations to select from, if there are more
_ROTATIONS = {
    1: cv2.ROTATE_90_COUNTERCLOCKWISE,
    2: cv2.ROTATE_180,
    3: cv2.ROTATE_90_CLOCKWISE,
}


@register_transform("rotate_90")
@dataclass(frozen=True, kw_only=True)
class Rotate90(Transform):
    """Rotate counterclockwise by a random multiple of 90 degrees (RotNet, arXiv:1803.07728).

    Rotations by 90 and 270 degrees swap height and width, so crop to a square first.
    """

    k: list[int] = field(default_factory=lambda: [0, 1, 2, 3])
    """Numbers of counterclockwise 90-degree turns, from 0 to 3; one of them is drawn."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if not self.k or not set(self.k) <= {0, 1, 2, 3}:
            yield f"k: {self.k}; a list of some of 0, 1, 2 and 3 is expected"

    def draw(self, rng: np.random.Generator, height: int, width: int) -> int | None:
        """Return the number of counterclockwise 90-degree turns, or None for no rotation."""
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
        """Return the number of counterclockwise 90-degree turns, 0 to 3."""
        return (float(params or 0),)


def drawn_rotation(
    seed: int, epoch: int, index: int, view: int, turns: Sequence[int] = (0, 1, 2, 3)
) -> int:
    """Return the number of counterclockwise 90-degree turns that ``rotate_90`` drew for a view.

    Args:
        seed: Seed of the run.
        epoch: First number of the sample's ``key``.
        index: Second number of the sample's ``key``.
        view: Number of the view among all views of the sample, from 0, counting those that are
            only used to make other views.
        turns: The ``k`` of the transform.
    """
    return turns[int(draw_at(draw_rng(seed, epoch, index, view), ROTATION) * len(turns))]


class Puzzle(NamedTuple):
    """Parameters of ``jigsaw`` for an image with T tiles."""

    permutation: int  # index into ``permutations``
    left: np.ndarray  # (T,) offset of each tile in its cell, in pixels
    top: np.ndarray  # (T,) likewise


@register_transform("jigsaw")
@dataclass(frozen=True, kw_only=True)
class Jigsaw(Transform):
    """Make a jigsaw puzzle: put the tiles of the image in a random order (arXiv:1603.09246).

    The image is divided into cells, and one tile is cut out of each cell at a random position, so
    that edges do not reveal which tiles are neighbors. The tiles are then put together without
    gaps. Position k, counted row by row, shows tile ``permutations(...)[drawn][k]``.
    """

    resizes = "tiles"

    affine: ClassVar[bool] = False

    grid: int = setting(3, min=2, max=15)
    """Number of tiles in each row and in each column."""
    tile: int | None = setting(None, min=1)
    """Side of a tile, in pixels; null: as large as a cell."""
    num_permutations: int = setting(100, min=1)
    """Number of permutations from which one is drawn."""

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
        for position, tile in enumerate(order.tolist()):
            down, across = divmod(tile, self.grid)
            top, left = down * cell[0] + params.top[tile], across * cell[1] + params.left[tile]
            down, across = divmod(position, self.grid)
            puzzle[down * rows : (down + 1) * rows, across * columns : (across + 1) * columns] = (
                image[top : top + rows, left : left + columns]
            )
        return puzzle

    def numbers(self, params: Puzzle | None) -> Sequence[float]:
        """Return the number of the tile at each position of the puzzle, row by row.

        NaN if no puzzle is made.
        """
        if params is None:
            return (math.nan,) * self.grid**2
        orders = permutations(self.grid**2, self.num_permutations)
        return [float(tile) for tile in orders[params.permutation]]


def tile_size(height: int, width: int, grid: int, side: int | None) -> tuple[int, int]:
    """Return height and width of the tiles of an image.

    Args:
        height: Height of the image, in pixels.
        width: Width of the image, in pixels.
        grid: Number of cells in each row and in each column.
        side: Side of a tile, in pixels; None: tiles are as large as their cells.

    Raises:
        UserError: If the cells are smaller than a tile.
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
    """Cut out one tile of the image: view k of the group shows cell k of a grid.

    Cells are counted row by row, and counting starts again at 0 after the last cell. The tile is at
    a random position in its cell. Use it in a group of views that is made from another group, so
    that all tiles come from the same crop.
    """

    resizes = "square"

    view_number: ClassVar[int] = 0  # number of the view in its group; set by the pipeline

    grid: int = setting(3, min=2, max=15)
    """Number of cells in each row and in each column."""
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
        """Return left, top, right and bottom of the tile, in pixels of the input image.

        NaN if no tile is cut out.
        """
        return params or (math.nan,) * 4


def drawn_permutation(
    seed: int, epoch: int, index: int, view: int, num_permutations: int = 100
) -> int:
    """Return the number of the permutation that ``jigsaw`` drew for a view.

    Args:
        seed: Seed of the run.
        epoch: First number of the sample's ``key``.
        index: Second number of the sample's ``key``.
        view: Number of the view among all views of the sample, from 0, counting those that are
            only used to make other views.
        num_permutations: ``num_permutations`` of the transform.
    """
    return int(draw_at(draw_rng(seed, epoch, index, view), PERMUTATION) * num_permutations)


@cache
def permutations(num_tiles: int, count: int) -> np.ndarray:
    """Return permutations that differ much from each other, uint8 (count, num_tiles).

    They are selected one after the other: each maximizes the smallest Hamming distance to those
    already selected. Candidates are all permutations, or fixed random ones if there are more than
    ``CANDIDATES``.
    """
    if math.factorial(num_tiles) <= CANDIDATES:
        listed = list(itertools.permutations(range(num_tiles)))
        candidates = np.array(listed, dtype=np.uint8).T
    else:
        draws = np.random.Generator(np.random.Philox(key=num_tiles))
        shuffled = np.argsort(draws.random((CANDIDATES, num_tiles)), axis=1)
        candidates = np.unique(shuffled, axis=0).astype(np.uint8).T
    candidates = np.ascontiguousarray(candidates)  # (T, N): comparisons then run along N
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
    """Keep some random channels and overwrite the others, with probability p.

    Prevents a network from finding the position of a patch by chromatic aberration
    (arXiv:1505.05192).
    """

    keep: int = setting(1, min=1)
    """Number of channels to keep; must be smaller than the number of channels."""
    fill: int = setting(0, min=0, max=255)
    """Gray level of the overwritten channels."""
    p: float = setting(0.5, min=0, max=1)
    """Probability that the transform is applied."""

    def channel_problems(self, channels: int) -> Iterator[str]:
        if self.keep >= channels:
            yield f"keep: {self.keep}; the data have {channels}, and less than that is expected"

    def draw(self, rng: np.random.Generator, height: int, width: int) -> np.ndarray | None:
        """Return the indices (C - keep,) of the channels to overwrite, or None."""
        chance, *draws = rng.random(1 + self.channels).tolist()
        return np.argsort(draws)[self.keep :] if chance < self.p else None

    def apply(self, image: np.ndarray, params: np.ndarray) -> np.ndarray:
        changed = image.copy()
        changed[..., params] = self.fill
        return changed
