"""Noise images, for benchmarks and tests without data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from selftask.config.fields import setting
from selftask.data.source import Source
from selftask.random.splitmix import hash_words
from selftask.registry import register_source

_STREAM = 0x73796E74  # "synt": separates these draws from other uses of the same seed


@register_source("synthetic")
class Synthetic(Source):
    """Noise added to a random color for each class; image i depends only on the seed and i."""

    drawn_in_size = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        count: int = setting(1000, min=1, also=["n", "num_images"])
        """Number of images."""
        size: int = setting(224, min=1, max=16_384)
        """Height and width, in pixels."""
        classes: int = setting(10, min=1)
        """Number of classes; image i has the label i % classes."""
        image_channels: int = setting(3, min=1, max=64)
        """Number of channels of each image."""
        seed: int = setting(0, min=0)
        """Seed of the pixel values."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.channels = config.image_channels
        self.labels = np.arange(config.count, dtype=np.int64) % config.classes

    def __len__(self) -> int:
        return self.config.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        size, label = self.config.size, int(self.labels[index])
        noise = _generator(self.config.seed, 0, index)
        image = noise.integers(0, 128, (size, size, self.channels), dtype=np.uint8)
        color = _generator(self.config.seed, 1, label)
        return image + color.integers(0, 128, self.channels, dtype=np.uint8), label

    def path(self, index: int) -> str:
        return f"synthetic:{self.config.seed}:{index}"

    def describe(self) -> str:
        """Return a line such as ``1000 images of 224x224, 10 classes (synthetic)``."""
        size = f"{self.config.size}x{self.config.size}"
        return f"{len(self)} images of {size}, {self.config.classes} classes (synthetic)"


def _generator(*words: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(hash_words(_STREAM, *words)))
