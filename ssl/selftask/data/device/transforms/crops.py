"""Batched crops and sizes; the only operations that take images of different sizes."""

from __future__ import annotations

import math
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
    to_levels,
)
from selftask.data.device.resampling import filter_matrix, resample
from selftask.data.transforms.crops import TRIES, CenterCrop, RandomCrop, RandomResizedCrop, Resize
from selftask.registry import register_batched_transform

if TYPE_CHECKING:
    from selftask.random.views import Streams


@register_batched_transform("random_resized_crop")
class BatchedRandomResizedCrop(Operation):
    """Boxes of any place and size, resampled to one square."""

    ragged = True
    in_place = False
    transform: RandomResizedCrop

    def size_after(self, height: int, width: int, params: Any = None) -> tuple[int, int]:
        return self.transform.size, self.transform.size

    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> Arrays:
        return {"box": np.array(params, dtype=np.float32)}

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        """The tries of all images together; each goes on until its crop fits."""
        crop = self.transform
        box = np.array([crop.centre_box(w, h) for h, w in sizes.tolist()], dtype=np.int64)
        low, high = math.log(crop.ratio[0]), math.log(crop.ratio[1])
        rows = np.arange(len(sizes))
        for _ in range(TRIES):
            of_area, of_ratio, of_left, of_top = streams.random(4, rows).T
            height, width = sizes[rows].T
            area = width * height * (crop.scale[0] + (crop.scale[1] - crop.scale[0]) * of_area)
            ratio = np.exp(low + (high - low) * of_ratio)
            w = np.rint(np.sqrt(area * ratio)).astype(np.int64)
            h = np.rint(np.sqrt(area / ratio)).astype(np.int64)
            left = (of_left * (width - w + 1)).astype(np.int64)
            top = (of_top * (height - h + 1)).astype(np.int64)
            fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
            box[rows[fits]] = np.stack([left, top, left + w, top + h], axis=1)[fits]
            rows = rows[~fits]
            if not len(rows):
                break
        return {"box": box.astype(np.float32)}

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
    """The shorter side becomes ``size``; images of different shapes stay so."""

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
    """A square cut out, with black where it reaches beyond the image."""

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
    """The square in the middle."""

    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> Arrays:
        room = sizes - self.transform.size
        before = np.maximum(0, -room) // 2  # black above and on the left
        return {"corner": (np.rint(np.maximum(0, room) / 2) - before).astype(np.float32)}

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        return self.pack((), sizes)


@register_batched_transform("random_crop")
class BatchedRandomCrop(BatchedCut):
    """A square at a random place of the padded image."""

    transform: RandomCrop

    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> Arrays:
        return self._pack(np.array(params, dtype=np.int64)[:, ::-1], sizes)

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        room = np.maximum(0, sizes + 2 * self.transform.padding - self.transform.size)
        across, down = streams.random(2).T
        draws = np.stack([down, across], axis=1)
        return self._pack((draws * (room + 1)).astype(np.int64), sizes)

    def _pack(self, corner: np.ndarray, sizes: np.ndarray) -> Arrays:
        """``corner`` (B, 2) is top and left in the padded image."""
        padding = self.transform.padding
        missing = np.maximum(0, self.transform.size - sizes - 2 * padding)
        return {"corner": (corner - padding - missing // 2).astype(np.float32)}


def cut(values: Tensor, axis: int, start: Tensor, end: Any, size: int) -> Tensor:
    """``size`` rows or columns of each image from its own ``start`` (B,) on.

    Those before 0 and from ``end`` on, a number or (B, 1), are black.
    """
    places = start[:, None] + torch.arange(size, device=values.device)  # (B, size)
    outside = (places < 0) | (places >= end)
    places = places.clamp(0, values.shape[axis] - 1).long()
    shape = list(values.shape)
    shape[axis] = size
    along = (slice(None), None, slice(None), None) if axis == 2 else (slice(None), None, None)
    taken = values.gather(axis, places[along].expand(shape))
    return taken.masked_fill_(outside[along], 0.0)
