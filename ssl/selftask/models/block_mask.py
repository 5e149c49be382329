"""Block masks: random rectangles that together cover up to a given number of patches.

Bao et al., BEiT: BERT Pre-Training of Image Transformers, ICLR 2022, arXiv:2106.08254, algorithm 1,
with the sizes of BEiT's published code, which iBOT, data2vec and DINOv2 use.

B images, h x w patches in a grid, N = h * w.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from selftask.random.keyed import uniform

Values: TypeAlias = np.ndarray
Sides: TypeAlias = tuple[np.ndarray, np.ndarray]

_DRAWS = 4  # per rectangle: area, shape, row, column
_TRIES = 10  # consecutive failures before an image is finished, as in the published code


class MaskSampler(Protocol):
    """Sampler of masks for a grid of N patches."""

    num_patches: int
    num_draws: int
    """Number of draws for an image."""

    def from_draws(self, draws: Tensor, counts: Tensor) -> Tensor:
        """Turn draws in [0, 1) into masks of patches.

        Args:
            draws: (B, ``num_draws``).
            counts: int64 (B,), numbers of patches to mask. A mask may have fewer.

        Returns:
            (B, N) bool, True for masked patches.
        """


class BlockMask:
    """Sampler of block masks, drawn on the CPU as a function of seed and key.

    Rectangles are tried one after another. A rectangle is accepted if it is smaller than the grid
    in both directions, adds patches to the mask, but not more than ``max_patches``, and does not
    exceed the requested number of masked patches. A mask therefore has at most this number of
    patches, and usually slightly fewer.

    Args:
        grid: Rows and columns of patches (h, w).
        min_patches: Smallest area of a rectangle, before its sides are rounded. It may be smaller
            if fewer patches remain to be masked.
        max_patches: Largest area of a rectangle, before its sides are rounded; None: half of the
            image.
        min_aspect: Smallest height / width of a rectangle; the largest is its inverse.
        max_tries: Maximum number of rectangles tried per image.
    """

    def __init__(
        self,
        grid: tuple[int, int],
        *,
        min_patches: int = 4,
        max_patches: int | None = None,
        min_aspect: float = 0.3,
        max_tries: int = 64,
    ) -> None:
        self.grid = grid
        self.num_patches = grid[0] * grid[1]
        self.min_patches = min_patches
        self.max_patches = self.num_patches // 2 if max_patches is None else max_patches
        self.max_log_aspect = -math.log(min_aspect)
        self.max_tries = max_tries
        self.num_draws = _DRAWS * max_tries

    def draw(self, seed: int, key: Tensor, counts: Tensor) -> Tensor:
        """Draw a mask for each key.

        Args:
            seed: Seed of the run.
            key: int64 (B, 2), see ``random.keyed``.
            counts: int64 (B,), maximum number of patches to mask.

        Returns:
            (B, N) bool, True for masked patches.
        """
        return self.from_draws(uniform(seed, key, self.num_draws), counts)

    def from_draws(self, draws: Tensor, counts: Tensor) -> Tensor:
        """Turn draws into masks; all tensors are on the CPU.

        Each round tries the next ten rectangles of each unfinished image and accepts the first
        acceptable one. An image is finished when none of the ten is acceptable.

        Args:
            draws: (B, ``num_draws``) in [0, 1).
            counts: int64 (B,), maximum number of patches to mask.

        Returns:
            (B, N) bool, True for masked patches.
        """
        rectangles = draws.unflatten(1, (self.max_tries, _DRAWS)).permute(2, 0, 1).clone()
        rectangles[1] = torch.exp(self.max_log_aspect * (2 * rectangles[1] - 1))
        values = rectangles.numpy()  # (4, B, tries)
        mask = np.zeros((len(draws), *self.grid), dtype=bool)
        room = counts.numpy().copy()  # patches that may still be masked
        images, first_try = np.arange(len(draws)), np.zeros_like(room)
        while len(images):
            tries = first_try[:, None] + np.arange(_TRIES)  # (A, 10) for A unfinished images
            chosen = values[:, images[:, None], tries.clip(max=self.max_tries - 1)]
            most = room[images, None].clip(max=self.max_patches)
            rows, columns, fits = self._rectangles(chosen, most)
            added = _num_unmasked(mask[images], rows, columns)
            accepted = fits & (added > 0) & (added <= most) & (tries < self.max_tries)
            best = np.arange(len(images)), accepted.argmax(axis=1)
            goes_on = accepted[best]
            best = best[0][goes_on], best[1][goes_on]
            images, first_try = images[goes_on], tries[best] + 1
            room[images] -= added[best]
            mask[images] |= (
                _between(rows, best, self.grid[0])[:, :, None]
                & _between(columns, best, self.grid[1])[:, None, :]
            )
        return torch.from_numpy(mask).flatten(1)

    def _rectangles(self, draws: Values, most: Values) -> tuple[Sides, Sides, Values]:
        """Return (first, end) rows and columns of rectangles, and whether they fit, (A, 10)."""
        area, aspect, down, right = draws
        area = self.min_patches + (most - self.min_patches).astype(np.float32) * area
        height, width = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
        fits = (height < self.grid[0]) & (width < self.grid[1])
        return _side(height, down, self.grid[0]), _side(width, right, self.grid[1]), fits


def _side(size: Values, draw: Values, length: int) -> Sides:
    """Return the (first, end) indices of ``size`` consecutive positions at a drawn offset."""
    free = (length - size).clip(min=0)
    first = np.minimum(np.floor(draw * (free + 1)), free)  # minimum: rounding may reach 1
    return first.astype(np.int64), (first + size).clip(max=length).astype(np.int64)


def _num_unmasked(mask: Values, rows: Sides, columns: Sides) -> Values:
    """Return the number of unmasked patches in each rectangle, using a summed-area table.

    Args:
        mask: (A, h, w) bool.
        rows: First row of each rectangle, and the row after its last, (A, 10) each.
        columns: Likewise for columns.
    """
    sums = np.zeros((len(mask), mask.shape[1] + 1, mask.shape[2] + 1), dtype=np.int32)
    np.cumsum((~mask).cumsum(axis=1, dtype=np.int32), axis=2, out=sums[:, 1:, 1:])
    image = np.arange(len(mask))[:, None]
    (top, bottom), (left, right) = rows, columns
    lower = sums[image, bottom, right] - sums[image, bottom, left]
    upper: Values = sums[image, top, right] - sums[image, top, left]
    return lower - upper


def _between(sides: Sides, chosen: Any, length: int) -> Values:
    """Return a mask of the positions within the chosen sides, bool (A, ``length``)."""
    positions = np.arange(length)
    first, end = (side[chosen][:, None] for side in sides)
    return (positions >= first) & (positions < end)
