"""Block masks: rectangles of patches until a given number of patches is covered.

Bao et al., BEiT: BERT Pre-Training of Image Transformers, ICLR 2022, arXiv:2106.08254, algorithm 1,
with the sizes of BEiT's published code, which iBOT, data2vec and DINOv2 use.

B images, h x w patches in a grid, N = h * w.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from selftask.random.keyed import uniform

_DRAWS = 4  # per rectangle: area, shape, row, column
_TRIES = 10  # consecutive failures before an image is finished, as in the published code


class BlockMask:
    """Sampler of block masks: a function of seed and key, on the device of the key.

    Rectangles are tried one after another. A rectangle is accepted if it covers patches that are
    not yet masked, and no more than remain to be masked. A mask therefore has at most the requested
    number of patches, and usually slightly fewer.

    Args:
        grid: Rows and columns of patches (h, w).
        min_patches: Smallest area of a rectangle.
        max_patches: Largest area of a rectangle; None: half of the image.
        min_aspect: Smallest height / width of a rectangle; the largest is its inverse.
        max_tries: Number of rectangles tried per image.
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
            key: (B, 2), see ``random.keyed``.
            counts: (B,) maximum number of patches to mask.

        Returns:
            (B, N) bool, True for masked patches.
        """
        return self.from_draws(uniform(seed, key, self.num_draws), counts)

    def from_draws(self, draws: Tensor, counts: Tensor) -> Tensor:
        """Turn draws in [0, 1) of shape (B, ``num_draws``) into masks (B, N)."""
        mask = torch.zeros(len(draws), self.num_patches, dtype=torch.bool, device=draws.device)
        failures = torch.zeros_like(counts)  # consecutive failures
        for one in draws.unflatten(1, (self.max_tries, _DRAWS)).unbind(1):
            room = counts - mask.sum(dim=1)  # (B,)
            block, fits = self._rectangle(one, room.clamp(max=self.max_patches))
            added = (block & ~mask).sum(dim=1)
            open_ = (room > 0) & (failures < _TRIES)
            if mask.device.type == "cpu" and not open_.any():  # others would synchronize
                break
            taken = fits & (added > 0) & (added <= room.clamp(max=self.max_patches)) & open_
            mask |= block & taken[:, None]
            failures = torch.where(taken, 0, failures + 1)
        return mask

    def _rectangle(self, draws: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        """Return rectangles (B, N) of ``min_patches`` to ``most`` (B,) patches, and which fit."""
        area, aspect, down, right = draws.unbind(dim=1)
        area = self.min_patches + (most - self.min_patches) * area
        aspect = torch.exp(self.max_log_aspect * (2 * aspect - 1))
        height, width = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
        fits = (height < self.grid[0]) & (width < self.grid[1])
        rows = _run(height, down, self.grid[0])
        columns = _run(width, right, self.grid[1])
        return (rows[:, :, None] & columns[:, None, :]).flatten(1), fits


def _run(size: Tensor, draw: Tensor, length: int) -> Tensor:
    """Return ``size`` (B,) consecutive places at a drawn offset: bool (B, length)."""
    free = (length - size).clamp(min=0)
    first = (draw * (free + 1)).floor().minimum(free)  # minimum: rounding may reach 1
    positions = torch.arange(length, device=size.device)
    return (positions >= first[:, None]) & (positions < (first + size)[:, None])
