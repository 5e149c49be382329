"""Batched noise and erased rectangles.

Workers draw the noise image by image and put it into the batch, as uint8 or int16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from selftask.data.device.operation import Arrays, Images, Operation, Tensors, to_levels
from selftask.data.device.transforms.crops import first_fits
from selftask.data.transforms.noise import (
    Cutout,
    GaussianNoise,
    Hole,
    RandomErasing,
    SaltAndPepper,
)
from selftask.registry import register_batched_transform

if TYPE_CHECKING:
    from selftask.random.views import Streams

WHITE, BLACK = 1, 2


class BatchedHoles(Operation):
    """Base class: rectangles filled with one color or with noise."""

    in_place = False
    transform: RandomErasing | Cutout

    def __init__(self, transform: RandomErasing | Cutout) -> None:
        super().__init__(transform)
        self._noisy = transform.fill == "noise"
        self.vectorised = not self._noisy

    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> Arrays:
        holes = [_holes(one) for one in params]
        box = np.zeros((len(holes), max(1, *map(len, holes)), 4))
        for place, some in zip(box, holes, strict=True):
            for number, hole in enumerate(some):
                place[number] = hole[:4]
        packed = {"box": box}
        if self._noisy:
            packed["values"] = self._noise(holes, *sizes[0].tolist())
        return packed

    def _noise(self, holes: list[list[Hole]], height: int, width: int) -> np.ndarray:
        """Return images with the fill of the holes, zero elsewhere, uint8 (B, H, W, C)."""
        noise = np.zeros((len(holes), height, width, self.transform.channels), dtype=np.uint8)
        for place, some in zip(noise, holes, strict=True):
            for hole in some:
                place[hole.top : hole.bottom, hole.left : hole.right] = hole.values
        return noise

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        values = images.values
        inside = _inside(packed["box"], *values.shape[2:])
        if self._noisy:
            fill = packed["values"].permute(0, 3, 1, 2).to(values.dtype)
        else:
            fill = _colour(self.transform.fill, values)
        return images.with_values(torch.where(inside, fill, values))


@register_batched_transform("random_erasing")
class BatchedRandomErasing(BatchedHoles):
    """Random erasing: one rectangle."""

    transform: RandomErasing

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        box = np.zeros((len(sizes), 1, 4))
        (rows,) = np.nonzero(streams.random(1)[:, 0] < self.transform.p)
        first_fits(streams, sizes, rows, self.transform.attempt, box[:, 0])
        return {"box": box}


@register_batched_transform("cutout")
class BatchedCutout(BatchedHoles):
    """Cutout: the same number of squares in each image."""

    transform: Cutout

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        cutout = self.transform
        box = np.zeros((len(sizes), cutout.num_holes, 4))
        (rows,) = np.nonzero(streams.random(1)[:, 0] < cutout.p)
        places = streams.random(2 * cutout.num_holes, rows).reshape(len(rows), cutout.num_holes, 2)
        height, width = sizes[rows].T[..., None]
        sides = cutout.box(places[..., 0], places[..., 1], height, width, np)
        box[rows] = np.stack(sides, axis=2)
        return {"box": box}


@register_batched_transform("gaussian_noise")
class BatchedGaussianNoise(Operation):
    """Gaussian noise, drawn by the workers."""

    vectorised = False
    transform: GaussianNoise

    def pack(self, params: Sequence[np.ndarray | None], sizes: np.ndarray) -> Arrays:
        channels = 1 if self.transform.gray else self.transform.channels
        noise = np.zeros((len(params), *sizes[0], channels), dtype=np.int16)
        for place, one in zip(noise, params, strict=True):
            if one is not None:
                place[:] = one[..., :channels]
        return {"noise": noise}

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        noise = packed["noise"].permute(0, 3, 1, 2)
        return images.with_values(to_levels(images.values.add_(noise)))


@register_batched_transform("salt_and_pepper")
class BatchedSaltAndPepper(Operation):
    """White and black pixels; a pixel that is drawn for both becomes black."""

    vectorised = False
    transform: SaltAndPepper

    def pack(self, params: Sequence[np.ndarray | None], sizes: np.ndarray) -> Arrays:
        grains = np.zeros((len(params), *sizes[0]), dtype=np.uint8)
        for place, one in zip(grains, params, strict=True):
            if one is not None:
                half = -(-len(one) // 2)
                place.reshape(-1)[one[:half]] = WHITE
                place.reshape(-1)[one[half:]] = BLACK
        return {"grains": grains}

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        grains = packed["grains"][:, None]
        values = images.values.masked_fill_(grains == WHITE, 255.0)
        return images.with_values(values.masked_fill_(grains == BLACK, 0.0))


def _holes(params: Hole | list[Hole] | None) -> list[Hole]:
    if params is None:
        return []
    return [params] if isinstance(params, Hole) else params


def _inside(box: Tensor, height: int, width: int) -> Tensor:
    """Return whether each pixel is in one of its image's boxes (B, K, 4), bool (B, 1, H, W)."""
    left, top, right, bottom = box[..., None].unbind(2)  # (B, K, 1)
    x = torch.arange(width, device=box.device)
    y = torch.arange(height, device=box.device)
    across, down = (x >= left) & (x < right), (y >= top) & (y < bottom)
    return (down[..., None] & across[:, :, None]).any(1, keepdim=True)


def _colour(fill: Any, values: Tensor) -> Tensor:
    """Return the fill, one level or one for each channel, which broadcasts to ``values``."""
    levels = fill if isinstance(fill, list) else [fill]
    one = torch.stack([values.new_full((), level) for level in levels])
    return one[:, None, None]
