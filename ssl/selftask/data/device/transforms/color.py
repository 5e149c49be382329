"""Batched grayscale, solarize, posterize, invert and contrast noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selftask.data.device.operation import (
    Arrays,
    Images,
    RandomlyApplied,
    Tensors,
    UniformOperation,
    per_image,
    to_levels,
)
from selftask.data.transforms.color import LUMA, ContrastNoise
from selftask.registry import register_batched_transform


@register_batched_transform("grayscale")
class BatchedGrayscale(RandomlyApplied):
    """Grayscale: luma in all three channels."""

    def change(self, values: Tensor) -> Tensor:
        return luma(values).round_().expand_as(values)


@register_batched_transform("solarize")
class BatchedSolarize(RandomlyApplied):
    """Solarize: invert the values that are at least the threshold."""

    def change(self, values: Tensor) -> Tensor:
        return solarize(values, self.transform.threshold)


@register_batched_transform("posterize")
class BatchedPosterize(RandomlyApplied):
    """Posterize: keep the highest bits of each value."""

    def change(self, values: Tensor) -> Tensor:
        return posterize(values, 2.0 ** (8 - self.transform.bits))


@register_batched_transform("invert")
class BatchedInvert(RandomlyApplied):
    """Invert: 255 - x."""

    def change(self, values: Tensor) -> Tensor:
        return values.neg_().add_(255)


@register_batched_transform("contrast_noise")
class BatchedContrastNoise(UniformOperation):
    """Contrast noise: x * factor + offset + noise.

    Workers draw the noise image by image and put it into the batch.
    """

    transform: ContrastNoise

    def __init__(self, transform: ContrastNoise) -> None:
        super().__init__(transform)
        self.vectorised = not transform.noise

    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> Arrays:
        packed = super().pack([one[:2] for one in params], sizes)
        if self.transform.noise:
            packed["noise"] = np.stack([noise for _, _, noise in params])[..., 0]
        return packed

    def arrays(self, chosen: Any, params: Any, sizes: np.ndarray) -> Arrays:
        factor, offset = params
        return {"factor": factor, "offset": offset}

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        values = images.values.mul_(per_image(packed["factor"]))
        added = per_image(packed["offset"])
        if self.transform.noise:
            added = packed["noise"][:, None] + added
        return images.with_values(to_levels(values.add_(added)))


def solarize(values: Tensor, threshold: float | Tensor) -> Tensor:
    """Invert the values from ``threshold`` on: a number, or (B, 1, 1, 1) for each image."""
    return torch.where(values >= threshold, 255 - values, values)


def posterize(values: Tensor, step: float | Tensor) -> Tensor:
    """Round down to multiples of ``step``, in place.

    ``step`` is a power of two: a number, or (B, 1, 1, 1) for each image.
    """
    return values.div_(step).floor_().mul_(step)


def luma(values: Tensor) -> Tensor:
    """Return the luma, or the mean if there are not three channels; (B, 1, H, W), not rounded."""
    if values.shape[1] != len(LUMA):
        return values.mean(1, keepdim=True)
    red, green, blue = values.unbind(1)
    return red.mul(LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])[:, None]
