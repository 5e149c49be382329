"""Batched conversion to other color spaces: Lab, lightness only, BGR."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from selftask.data.device.operation import Arrays, Images, Operation, Tensors, to_levels
from selftask.registry import register_batched_transform

if TYPE_CHECKING:
    from selftask.random.views import Streams

# Linear sRGB to X, Y and Z relative to white (D65), as in OpenCV
_XYZ = (
    (0.412453 / 0.950456, 0.357580 / 0.950456, 0.180423 / 0.950456),
    (0.212671, 0.715160, 0.072169),
    (0.019334 / 1.088754, 0.119193 / 1.088754, 0.950227 / 1.088754),
)


class Converted(Operation):
    """Conversion without parameters."""

    in_place = False

    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> Arrays:
        return {}

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        return {}


@register_batched_transform("lab")
class BatchedLab(Converted):
    """Convert RGB to CIE L*a*b* in 8 bits."""

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        linear = _linear(images.values)
        x, y, z = (_cube_root(_weighted(linear, weights)) for weights in _XYZ)
        lab = torch.stack([(116 * y - 16) * 2.55, 500 * (x - y) + 128, 200 * (y - z) + 128], 1)
        return images.with_values(to_levels(lab))


@register_batched_transform("lightness")
class BatchedLightness(Converted):
    """Replace all three channels by L* of CIE L*a*b*."""

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        y = _cube_root(_weighted(_linear(images.values), _XYZ[1]))
        lightness = to_levels((116 * y - 16) * 2.55)
        return images.with_values(lightness[:, None].repeat(1, len(_XYZ), 1, 1))


@register_batched_transform("bgr")
class BatchedBgr(Converted):
    """Convert RGB to BGR."""

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        return images.with_values(images.values.flip(1))


def _linear(values: Tensor) -> Tensor:
    """Convert sRGB levels 0..255 to linear light in [0, 1]."""
    level = values / 255
    return torch.where(level > 0.04045, ((level + 0.055) / 1.055) ** 2.4, level / 12.92)


def _weighted(linear: Tensor, weights: tuple[float, float, float]) -> Tensor:
    """Return the weighted sum of red, green and blue, (B, H, W)."""
    red, green, blue = linear.unbind(1)
    return weights[0] * red + weights[1] * green + weights[2] * blue


def _cube_root(light: Tensor) -> Tensor:
    """Return the cube root as CIE L*a*b* defines it, which is linear near black."""
    root = light.clamp(min=1e-6) ** (1 / 3)
    return torch.where(light > (6 / 29) ** 3, root, light * (841 / 108) + 4 / 29)
