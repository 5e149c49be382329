"""Batched Gaussian blur, with a sigma for each image."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selftask.data.device.operation import Arrays, Tensors, UniformOperation, to_levels
from selftask.data.device.resampling import resample
from selftask.data.transforms.color import GaussianBlur
from selftask.registry import register_batched_transform

_LEAST = 1e-2  # pixels; a smaller sigma changes no pixel


@register_batched_transform("gaussian_blur")
class BatchedGaussianBlur(UniformOperation):
    """Gaussian blur as a product with two matrices for each image, like resizing."""

    reads = ("sigma",)
    transform: GaussianBlur

    @property
    def radius(self) -> int:
        """Largest radius of any kernel, in pixels."""
        return round(6 * self.transform.sigma[1] + 1) // 2

    def arrays(self, chosen: Any, params: Any, sizes: np.ndarray) -> Arrays:
        return {"kernel": half_kernels(np.where(chosen, params, 0.0).reshape(-1), self.radius)}

    def apply(self, values: Tensor, packed: Tensors, sizes: Tensor | None) -> Tensor:
        height, width = values.shape[2:]
        across = blur_matrix(packed["kernel"], width)
        down = across if height == width else blur_matrix(packed["kernel"], height)
        return to_levels(resample(values, down, across))


def half_kernels(sigma: np.ndarray, radius: int) -> np.ndarray:
    """Return Gaussian weights at distances of 0 to ``radius`` pixels, float64 (B, radius + 1).

    The weights of a whole kernel, on both sides, sum to 1. Kernels are truncated like those of
    OpenCV for 8-bit images.

    Args:
        sigma: Standard deviations in pixels, (B,).
        radius: Largest radius of any kernel, in pixels.
    """
    sigma = np.maximum(sigma, _LEAST)[:, None]
    steps = np.arange(radius + 1)
    inside = steps <= np.round(6 * sigma + 1) // 2
    weights = np.exp(-0.5 * np.square(steps / sigma)) * inside
    return weights / (2 * weights.sum(1, keepdims=True) - weights[:, :1])


def blur_matrix(kernels: Tensor, size: int) -> Tensor:
    """Return matrices (B, size, size) that blur rows or columns, with mirrored borders.

    As in OpenCV, mirroring does not repeat the border pixel. If an image is not larger than the
    largest radius, weights beyond the first mirror image are dropped and the others scaled up.

    Args:
        kernels: Result of ``half_kernels``, (B, radius + 1).
        size: Side of the image, in pixels.
    """
    radius = kernels.shape[1] - 1
    matrix = (kernels @ _reach(size, radius, kernels.device)).view(-1, size, size)
    return matrix if size > radius else matrix / matrix.sum(2, keepdim=True)


@cache
def _reach(size: int, radius: int, device: torch.device) -> Tensor:
    """Count the pixels, with mirror images, at distances of 0 to ``radius`` from each pixel.

    Returns:
        float32 (radius + 1, size * size), by distance and by pair of pixels.
    """
    pixel = torch.arange(size, device=device)
    to, last = pixel[:, None], size - 1
    none = 2 * size + radius  # a distance that is not counted
    steps = torch.arange(radius + 1, device=device)[:, None, None]
    reach = ((pixel - to).abs() == steps).float()
    reach += torch.where(pixel > 0, pixel + to, none) == steps
    reach += torch.where(pixel < last, 2 * last - pixel - to, none) == steps
    return reach.flatten(1)
