"""Batched crops, which accept images of different sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selftask.data.device.operation import Arrays, Operation, Tensors, UniformOperation, to_levels
from selftask.data.device.resampling import filter_matrix, resample
from selftask.data.transforms.boxes import TRIES, Attempt
from selftask.data.transforms.crops import RandomCrop, RandomResizedCrop
from selftask.random.views import Streams
from selftask.registry import register_batched_transform


@register_batched_transform("random_resized_crop")
class BatchedRandomResizedCrop(Operation):
    """Crop random boxes and resize them to a square."""

    crops = True
    shares_images = True
    reads = ("size", "interpolation")
    transform: RandomResizedCrop

    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> Arrays:
        return {"box": np.array(params, dtype=np.float32)}

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        crop = self.transform
        box = np.array([crop.center_box(w, h) for h, w in sizes.tolist()], dtype=np.float64)
        first_fits(streams, sizes, np.arange(len(sizes)), crop.attempt, box)
        return {"box": box}

    def apply(self, values: Tensor, packed: Tensors, sizes: Tensor | None) -> Tensor:
        size, interpolation = self.transform.size, self.transform.interpolation
        start, end = packed["box"].T.chunk(2)  # (2, B): columns, rows
        height, width = values.shape[2:]
        both = filter_matrix(start, end - start, size, max(height, width), interpolation)
        across, down = both[0, :, :, :width], both[1, :, :, :height]  # weights beyond it are 0
        return to_levels(resample(values, down, across))


@register_batched_transform("random_crop")
class BatchedRandomCrop(UniformOperation):
    """Random crop of the padded image, black outside the image."""

    crops = True
    reads = ("size",)
    transform: RandomCrop

    def arrays(self, chosen: Any, params: Any, sizes: np.ndarray) -> Arrays:
        left, top = params  # in the padded image
        padding = self.transform.padding
        missing = np.maximum(0, self.transform.size - sizes - 2 * padding)
        return {"corner": np.stack([top, left], axis=1) - padding - missing // 2}

    def apply(self, values: Tensor, packed: Tensors, sizes: Tensor | None) -> Tensor:
        corner = packed["corner"]
        for axis in (0, 1):
            end = values.shape[2 + axis] if sizes is None else sizes[:, axis, None]
            values = cut(values, 2 + axis, corner[:, axis], end, self.transform.size)
        return values


def first_fits(
    streams: Streams, sizes: np.ndarray, rows: np.ndarray, attempt: Attempt, boxes: np.ndarray
) -> None:
    """Draw the first random box that fits, like ``boxes.first_fit``, for images of a batch.

    Args:
        streams: Random streams of all images.
        sizes: Height and width of all images, int64 (B, 2).
        rows: Indices of the images that get a box, int64 (R,).
        attempt: Function that computes boxes from uniforms; see ``boxes.Attempt``.
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
    positions = start[:, None] + torch.arange(size, device=values.device)  # (B, size)
    outside = (positions < 0) | (positions >= end)
    positions = positions.clamp(0, values.shape[axis] - 1).long()
    shape = list(values.shape)
    shape[axis] = size
    along = (slice(None), None, slice(None), None) if axis == 2 else (slice(None), None, None)
    taken = values.gather(axis, positions[along].expand(shape))
    return taken.masked_fill_(outside[along], 0.0)
