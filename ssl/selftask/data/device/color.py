"""Batched gray, solarize and contrast; rounded and clipped to 8 bits."""

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
    chance,
    on_chosen,
    per_image,
    to_levels,
)
from selftask.data.transforms.color import (
    LUMA,
    ContrastNoise,
    Grayscale,
    Solarize,
)

if TYPE_CHECKING:
    from selftask.data.device.streams import Streams


@batched_form_of(Grayscale)
class BatchedGrayscale(Operation):
    """Luma in all three channels."""

    transform: Grayscale

    def pack(self, drawn: Sequence[Any], sizes: np.ndarray) -> Arrays:
        return chance(drawn)

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        return {"chosen": (streams.random(1)[:, 0] < self.transform.p).astype(np.float32)}

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        return on_chosen(images, packed["chosen"], lambda v: luma(v).round_().expand_as(v))


@batched_form_of(Solarize)
class BatchedSolarize(Operation):
    """255 - x from the threshold on."""

    transform: Solarize

    def pack(self, drawn: Sequence[Any], sizes: np.ndarray) -> Arrays:
        return chance(drawn)

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        return {"chosen": (streams.random(1)[:, 0] < self.transform.p).astype(np.float32)}

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        threshold = self.transform.threshold
        invert = lambda v: torch.where(v >= threshold, 255 - v, v)  # noqa: E731
        return on_chosen(images, packed["chosen"], invert)


@batched_form_of(ContrastNoise)
class BatchedContrastNoise(Operation):
    """x * factor + offset + noise, with the noise that was drawn.

    Noise is no function of a few numbers, so it travels with the batch, and many pictures' worth
    cannot be drawn at once.
    """

    transform: ContrastNoise

    def pack(self, drawn: Sequence[Any], sizes: np.ndarray) -> Arrays:
        factors, offsets, noises = zip(*drawn, strict=True)
        packed = {"factor": np.array(factors, np.float32), "offset": np.array(offsets, np.float32)}
        if self.transform.noise:
            packed["noise"] = np.stack(noises)[..., 0]
        return packed

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays | None:
        if self.transform.noise:
            return None
        (low, high), (least, most) = self.transform.contrast, self.transform.offset
        factor, offset = streams.random(2).T
        return {
            "factor": (low + (high - low) * factor).astype(np.float32),
            "offset": (255 * (least + (most - least) * offset)).astype(np.float32),
        }

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        values = images.values.mul_(per_image(packed["factor"]))
        added = per_image(packed["offset"])
        if self.transform.noise:
            added = packed["noise"][:, None] + added
        return images.with_values(to_levels(values.add_(added)))


def luma(values: Tensor) -> Tensor:
    """(B, 1, H, W) of (B, 3, H, W), not rounded."""
    red, green, blue = values.unbind(1)
    return red.mul(LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])[:, None]
