"""Batched crops and resizing, which accept images of different sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from selftask.data.device.operation import (
    Arrays,
    Images,
    Operation,
    Tensors,
    UniformOperation,
    to_levels,
)
from selftask.data.device.resampling import filter_matrix, resample
from selftask.data.transforms.boxes import TRIES, Attempt
from selftask.data.transforms.crops import CenterCrop, RandomCrop, RandomResizedCrop, Resize
from selftask.registry import register_batched_transform

if TYPE_CHECKING:
    from selftask.random.views import Streams


@register_batched_transform("random_resized_crop")
class BatchedRandomResizedCrop(Operation):
    """Crop random boxes and resize them to a square."""

    ragged = True
    in_place = False
    transform: RandomResizedCrop

    def size_after(self, height: int, width: int, params: Any = None) -> tuple[int, int]:
        return self.transform.size, self.transform.size

    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> Arrays:
        return {"box": np.array(params, dtype=np.float32)}

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        crop = self.transform
        box = np.array([crop.center_box(w, h) for h, w in sizes.tolist()], dtype=np.float64)
        first_fits(streams, sizes, np.arange(len(sizes)), crop.attempt, box)
        return {"box": box}

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        box, size, kind = packed["box"], self.transform.size, self.transform.interpolation
        height, width = images.values.shape[2:]
        start, length = box[:, :2], box[:, 2:] - box[:, :2]
        if height == width:  # both directions at once
            both = filter_matrix(start.flatten(), length.flatten(), size, (size, width), kind)
            across, down = both.view(-1, 2, size, width).unbind(1)
        else:
            across = filter_matrix(start[:, 0], length[:, 0], size, (size, width), kind)
            down = filter_matrix(start[:, 1], length[:, 1], size, (size, height), kind)
        return images.with_values(to_levels(resample(images.values, down, across)))


@register_batched_transform("resize")
class BatchedResize(Operation):
    """Resize the shorter side to ``size``, keeping the aspect ratio."""

    ragged = True
    in_place = False
    transform: Resize

    def size_after(self, height: int, width: int, params: Any = None) -> tuple[int, int]:
        size = self.transform.size
        if width <= height:
            return max(1, int(size * height / width)), size
        return size, max(1, int(size * width / height))

    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> Arrays:
        after = [self.size_after(height, width) for height, width in sizes.tolist()]
        return {"before": sizes.astype(np.float32), "after": np.array(after, dtype=np.float32)}

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        return self.pack((), sizes)

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        (height, width), after = packed["before"].unbind(1), packed["after"]
        rows, columns = images.values.shape[2:]
        interpolation, start = self.transform.interpolation, torch.zeros_like(height)
        shapes = (canvas[0], rows), (canvas[1], columns)
        down = filter_matrix(start, height, after[:, 0], shapes[0], interpolation)
        across = filter_matrix(start, width, after[:, 1], shapes[1], interpolation)
        values = to_levels(resample(images.values, down, across))
        return images.with_values(values, None if images.sizes is None else after)


class BatchedCut(Operation):
    """Base class: cut out a square, black outside the image."""

    ragged = True
    in_place = False
    transform: CenterCrop | RandomCrop

    def size_after(self, height: int, width: int, params: Any = None) -> tuple[int, int]:
        return self.transform.size, self.transform.size

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        corner = packed["corner"]
        values, sizes = images.values, images.sizes
        for axis in (0, 1):
            end = values.shape[2 + axis] if sizes is None else sizes[:, axis, None]
            values = cut(values, 2 + axis, corner[:, axis], end, self.transform.size)
        return images.with_values(values)


@register_batched_transform("center_crop")
class BatchedCenterCrop(BatchedCut):
    """Center crop."""

    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> Arrays:
        room = sizes - self.transform.size
        before = np.maximum(0, -room) // 2  # black rows at the top, black columns on the left
        return {"corner": (np.rint(np.maximum(0, room) / 2) - before).astype(np.float32)}

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        return self.pack((), sizes)


@register_batched_transform("random_crop")
class BatchedRandomCrop(UniformOperation, BatchedCut):
    """Random crop of the padded image."""

    transform: RandomCrop

    def arrays(self, chosen: Any, params: Any, sizes: np.ndarray) -> Arrays:
        left, top = params  # in the padded image
        padding = self.transform.padding
        missing = np.maximum(0, self.transform.size - sizes - 2 * padding)
        return {"corner": np.stack([top, left], axis=1) - padding - missing // 2}


def first_fits(
    streams: Streams, sizes: np.ndarray, rows: np.ndarray, attempt: Attempt, boxes: np.ndarray
) -> None:
    """Do ``boxes.first_fit`` for some images of a batch.

    Args:
        streams: Random streams of all images.
        sizes: Height and width of all images, int64 (B, 2).
        rows: Indices of the images that get a box, int64 (R,).
        attempt: Function that computes boxes from uniforms.
        boxes: Result, float64 (B, 4). The row of an image is overwritten if a box fits.
    """
    for _ in range(TRIES):
        if not len(rows):
            return
        fits, box = attempt(streams.random(4, rows).T, *sizes[rows].T, np)
        boxes[rows[fits]] = np.stack(box, axis=1)[fits]
        rows = rows[~fits]


def cut(values: Tensor, axis: int, start: Tensor, end: Any, size: int) -> Tensor:
    """Cut ``size`` rows or columns out of each image; those outside the image are black.

    Args:
        values: (B, C, H, W).
        axis: 2 for rows, 3 for columns.
        start: First row or column to take from each image, (B,).
        end: Number of rows or columns of the images, one for all or (B, 1).
        size: Number of rows or columns to return.
    """
    places = start[:, None] + torch.arange(size, device=values.device)  # (B, size)
    outside = (places < 0) | (places >= end)
    places = places.clamp(0, values.shape[axis] - 1).long()
    shape = list(values.shape)
    shape[axis] = size
    along = (slice(None), None, slice(None), None) if axis == 2 else (slice(None), None, None)
    taken = values.gather(axis, places[along].expand(shape))
    return taken.masked_fill_(outside[along], 0.0)
