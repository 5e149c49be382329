"""Batched pretext transforms: rotation by multiples of 90 degrees, jigsaw, tiles, channel drop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from selftask.data.device.operation import (
    Arrays,
    Images,
    Operation,
    Tensors,
    fitted,
    per_image,
)
from selftask.data.device.transforms.crops import cut
from selftask.data.transforms.crops import Box
from selftask.data.transforms.pretext import (
    ChannelDrop,
    Jigsaw,
    Puzzle,
    Rotate90,
    Tile,
    permutations,
    tile_size,
)
from selftask.random.views import replayed
from selftask.registry import register_batched_transform

if TYPE_CHECKING:
    from selftask.random.views import Streams


@register_batched_transform("rotate_90")
class BatchedRotate90(Operation):
    """Rotation by multiples of 90 degrees; 90 and 270 degrees swap height and width."""

    in_place = False
    vectorised = False  # the rotation is drawn at a fixed block of the stream
    transform: Rotate90

    def size_after(self, height: int, width: int, params: int | None = None) -> tuple[int, int]:
        return (width, height) if (params or 0) % 2 else (height, width)

    def sizes_after(self, sizes: np.ndarray, packed: Any) -> np.ndarray:
        return np.where(packed["turns"][:, None] % 2, sizes[:, ::-1], sizes)

    def pack(self, params: Sequence[int | None], sizes: np.ndarray) -> Arrays:
        turns = np.array([one or 0 for one in params])
        return {"turns": turns, "after": self.sizes_after(sizes, {"turns": turns})}

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        made = fitted(images.values, canvas)
        for turns in sorted({*self.transform.k} - {0}):
            turned = fitted(images.values.rot90(turns, (2, 3)), canvas)
            made = torch.where(per_image(packed["turns"]) == turns, turned, made)
        return images.with_values(made, packed["after"])


@register_batched_transform("jigsaw")
class BatchedJigsaw(Operation):
    """Jigsaw puzzle, with the order of tiles that was drawn for each image."""

    in_place = False
    vectorised = False  # the permutation is drawn at a fixed block of the stream
    transform: Jigsaw

    def size_after(self, height: int, width: int, params: Any = None) -> tuple[int, int]:
        rows, columns = tile_size(height, width, self.transform.grid, self.transform.tile)
        return self.transform.grid * rows, self.transform.grid * columns

    def pack(self, params: Sequence[Puzzle], sizes: np.ndarray) -> Arrays:
        """Return top and left in the image of the tile at each position, (B, T) in pixels."""
        grid, (height, width) = self.transform.grid, sizes[0]
        orders = permutations(grid**2, self.transform.num_permutations)
        tile = orders[[puzzle.permutation for puzzle in params]].astype(np.int64)  # (B, T)
        down, across = np.divmod(tile, grid)
        tops, lefts = (np.array([getattr(one, side) for one in params]) for side in ("top", "left"))
        return {
            "top": down * (height // grid) + np.take_along_axis(tops, tile, 1),
            "left": across * (width // grid) + np.take_along_axis(lefts, tile, 1),
        }

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        values, grid = images.values, self.transform.grid
        rows, columns = (side // grid for side in canvas)
        y, x = (torch.arange(side, device=values.device) for side in canvas)
        place = (y // rows)[:, None] * grid + x // columns  # (H', W')
        top, left = (packed[side].long()[:, place] for side in ("top", "left"))  # (B, H', W')
        at = (top + (y % rows)[:, None]) * values.shape[3] + left + x % columns
        taken = values.flatten(2).gather(2, at.flatten(1)[:, None].expand(-1, values.shape[1], -1))
        return images.with_values(taken.view(*values.shape[:2], *canvas))


@register_batched_transform("tile")
class BatchedTile(Operation):
    """Cut out one tile of each image."""

    in_place = False
    transform: Tile

    def size_after(self, height: int, width: int, params: Any = None) -> tuple[int, int]:
        return tile_size(height, width, self.transform.grid, self.transform.size)

    def pack(self, params: Sequence[Box], sizes: np.ndarray) -> Arrays:
        return {"corner": np.array(params, dtype=np.float32)[:, 1::-1]}  # top and left

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        return self.pack(replayed(self.transform, streams.random(2), sizes), sizes)

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        values = images.values
        for axis in (2, 3):
            corner = packed["corner"][:, axis - 2]
            values = cut(values, axis, corner, values.shape[axis], canvas[axis - 2])
        return images.with_values(values)


@register_batched_transform("channel_drop")
class BatchedChannelDrop(Operation):
    """Overwrite the drawn channels of each image."""

    in_place = False
    transform: ChannelDrop

    def pack(self, params: Sequence[np.ndarray | None], sizes: np.ndarray) -> Arrays:
        dropped = np.zeros((len(params), self.transform.channels))
        for row, channels in enumerate(params):
            if channels is not None:
                dropped[row, channels] = 1
        return {"dropped": dropped}

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        draws = streams.random(1 + self.transform.channels)
        return self.pack(replayed(self.transform, draws, sizes), sizes)

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        dropped = packed["dropped"][:, :, None, None] != 0
        return images.with_values(images.values.masked_fill(dropped, self.transform.fill))
