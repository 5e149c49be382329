"""Batched Gaussian blur, with a sigma for each image."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selftask.data.device.operation import (
    Arrays,
    Tensors,
    UniformOperation,
    on_chosen,
    to_levels,
)
from selftask.data.device.resampling import resample
from selftask.data.transforms.color import GaussianBlur
from selftask.registry import register_batched_transform

_LEAST = 1e-2  # pixels; a smaller sigma changes no pixel


@register_batched_transform("gaussian_blur")
class BatchedGaussianBlur(UniformOperation):
    """Gaussian blur as a product with two matrices for each image, like resizing."""

    transform: GaussianBlur

    def arrays(self, chosen: Any, params: Any, sizes: np.ndarray) -> Arrays:
        return {"sigma": np.where(chosen, params, 0.0)}

    def apply(self, values: Tensor, packed: Tensors, sizes: Tensor | None) -> Tensor:
        blur = partial(_blur, radius=round(6 * self.transform.sigma[1] + 1) // 2)
        return on_chosen(values, packed["sigma"], blur, packed["sigma"])


def _blur(values: Tensor, sigma: Tensor, radius: int) -> Tensor:
    height, width = values.shape[2:]
    across = blur_matrix(sigma, width, radius)
    down = across if height == width else blur_matrix(sigma, height, radius)
    return to_levels(resample(values, down, across))


def blur_matrix(sigma: Tensor, size: int, radius: int) -> Tensor:
    """Return Gaussian weights (B, size, size), mirrored at the borders.

    Like OpenCV's kernel for 8 bits, the kernel is truncated, and mirroring does not repeat the
    border pixel. If an image is not larger than ``radius``, the largest kernel radius of any sigma,
    weights beyond the first mirror image are dropped and the others scaled up.

    Args:
        sigma: Standard deviations in pixels, (B,).
        size: Side of the image, in pixels.
        radius: Largest radius of any kernel, in pixels.
    """
    sigma = sigma.clamp(min=_LEAST)[:, None]
    steps = torch.arange(radius + 1, device=sigma.device, dtype=torch.float32)
    weights = torch.exp(steps.square() * (-0.5 / sigma.square())) * (steps <= _radius(sigma))
    weights = weights / (2 * weights.sum(1, keepdim=True) - weights[:, :1])  # (B, radius + 1)
    matrix = (weights @ _reach(size, radius, sigma.device)).view(-1, size, size)
    return matrix if size > radius else matrix / matrix.sum(2, keepdim=True)


def _radius(sigma: Tensor) -> Tensor:
    """Return the radius of OpenCV's kernel for 8 bits, in pixels."""
    return torch.floor(torch.round(6 * sigma + 1) / 2)


def _reach(size: int, radius: int, device: torch.device) -> Tensor:
    """Count how often a pixel or its mirror images are 0 to ``radius`` steps from another.

    Returns:
        float32 (radius + 1, size * size).
    """
    at = torch.arange(size, device=device)
    to, last = at[:, None], size - 1
    none = 2 * size + radius  # a distance that is not counted
    steps = torch.arange(radius + 1, device=device)[:, None, None]
    reach = ((at - to).abs() == steps).float()
    reach += torch.where(at > 0, at + to, none) == steps
    reach += torch.where(at < last, 2 * last - at - to, none) == steps
    return reach.flatten(1)
