"""Normalization of 8-bit pixels to floats, the last transform of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from selftask.config.fields import setting
from selftask.config.schema import Component
from selftask.data.transforms.channels import needs_number
from selftask.registry import register_transform

STATISTICS = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


@register_transform("normalize")
@dataclass(frozen=True, kw_only=True)
class Normalize:
    """Subtract a mean and divide by a standard deviation, per channel, on the scale [0, 1].

    The last transform of a pipeline. Workers return uint8 pixels, which take a quarter of the
    memory of floats. Whole batches are normalized on the device.
    """

    normalizes = True
    resizes = None
    is_random = False

    stats: Literal["imagenet", "cifar10", "cifar100", "half"] = "imagenet"
    """Data set whose mean and standard deviation are used; half: 0.5 for both. Not used if ``mean``
    and ``std`` are given."""
    mean: list[float] | None = None
    """Mean of each channel on the scale [0, 1]; needs ``std``. Null: the mean of ``stats``."""
    std: list[float] | None = setting(None, above=0)
    """Standard deviation of each channel on the scale [0, 1]; needs ``mean``. Null: the standard
    deviation of ``stats``.
    """

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if (self.mean is None) != (self.std is None):
            yield "mean: mean and std go together; give both or neither"
        if self.mean is not None and self.std is not None and len(self.mean) != len(self.std):
            yield f"mean: {len(self.mean)} numbers, and std has {len(self.std)}"

    def channel_problems(self, channels: int) -> Iterator[str]:
        subject = f"stats: {self.stats}" if self.mean is None else f"mean: {self.mean}"
        instead = "give mean and std of each (`selftask data stats` prints them), or stats: half"
        return needs_number(subject, len(self.moments(channels)[0]), channels, instead)

    def moments(self, channels: int = 3) -> tuple[list[float], list[float]]:
        """Return mean and standard deviation of each channel, on the scale [0, 1].

        Only ``half`` adapts to ``channels``; all others have a fixed number of values.
        """
        if self.mean is not None and self.std is not None:
            return self.mean, self.std
        if self.stats == "half":
            return [0.5] * channels, [0.5] * channels
        mean, std = STATISTICS[self.stats]
        return list(mean), list(std)

    def scale_and_shift(self, channels: int = 3) -> tuple[np.ndarray, np.ndarray]:
        """Return factors and offsets, float32 (C,), that normalize pixels in 0..255.

        A normalized pixel is ``pixel * factor + offset``.
        """
        mean, std = self.moments(channels)
        center, width = np.array(mean, dtype=np.float64), np.array(std, dtype=np.float64)
        return (1 / (255 * width)).astype(np.float32), (-center / width).astype(np.float32)


def moments_of(
    transforms: Sequence[Mapping[str, Any]], channels: int
) -> tuple[list[float], list[float]] | None:
    """Return mean and standard deviation of the last ``normalize``, on the scale [0, 1].

    None if there is no ``normalize``.

    Args:
        transforms: Transforms with their arguments, as in a recipe.
        channels: Number of channels of the images.
    """
    for transform in map(Component.from_dict, reversed(transforms)):
        if transform.name == "normalize":
            return Normalize(**transform.args).moments(channels)
    return None
