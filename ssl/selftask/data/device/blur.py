"""Batched Gaussian blur, each picture by its own sigma."""

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
    batched_form_of,
    on_chosen,
    to_levels,
)
from selftask.data.device.resampling import resample
from selftask.data.transforms.color import GaussianBlur

if TYPE_CHECKING:
    from selftask.data.device.streams import Streams

_LEAST = 1e-2  # pixels: below, a Gaussian is no more than its middle


@batched_form_of(GaussianBlur)
class BatchedGaussianBlur(Operation):
    """Two matrices a picture, as for resizing."""

    transform: GaussianBlur

    def pack(self, drawn: Sequence[Any], sizes: np.ndarray) -> Arrays:
        sigma = np.array([one or 0.0 for one in drawn], dtype=np.float32)
        return {"sigma": sigma}

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        chance, draw = streams.random(2).T
        low, high = self.transform.sigma
        sigma = np.where(chance < self.transform.p, low + (high - low) * draw, 0.0)
        return {"sigma": sigma.astype(np.float32)}

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        return on_chosen(images, packed["sigma"], _blur, packed["sigma"])


def _blur(values: Tensor, sigma: Tensor) -> Tensor:
    height, width = values.shape[2:]
    across = blur_matrix(sigma, width)
    down = across if height == width else blur_matrix(sigma, height)
    return to_levels(resample(values, down, across))


def blur_matrix(sigma: Tensor, size: int) -> Tensor:
    """(B, size, size): Gaussian weights cut off as OpenCV cuts 8-bit ones, mirrored at the ends.

    The pixel at an end is not repeated. Pictures smaller than the radius, 3 sigma, would be
    mirrored more than once; here their weights make up for what is missing.
    """
    sigma = sigma.clamp(min=_LEAST)
    radius = torch.floor(torch.round(6 * sigma + 1) / 2)[:, None, None]
    spread = (-0.5 / sigma.square())[:, None, None]
    to = torch.arange(size, device=sigma.device, dtype=torch.float32)[:, None]
    at = to.T
    last = size - 1
    beyond = 2.0 * size + radius  # no pixel is so far away
    weights = _gaussian(at - to, spread, radius)
    weights = weights + _gaussian(torch.where(at > 0, at + to, beyond), spread, radius)
    mirrored = torch.where(at < last, 2 * last - at - to, beyond)
    weights = weights + _gaussian(mirrored, spread, radius)
    return weights / weights.sum(2, keepdim=True)


def _gaussian(distance: Tensor, spread: Tensor, radius: Tensor) -> Tensor:
    return torch.exp(distance.square() * spread) * (distance.abs() <= radius)
