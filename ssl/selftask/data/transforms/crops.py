"""Crops and sizes, with torchvision's names and semantics; resizing is antialiased."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageOps

from selftask.registry import register_transform

RESAMPLING = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "nearest": Image.Resampling.NEAREST,
}
TRIES = 10  # random crops of a wrong shape before the centre is taken


@register_transform("random_resized_crop")
@dataclass(frozen=True, kw_only=True)
class RandomResizedCrop:
    """A crop of random area and aspect ratio, resized to a square."""

    size: int  # pixels
    scale: tuple[float, float] = (0.08, 1.0)  # of the image's area
    ratio: tuple[float, float] = (0.75, 1.3333333333333333)  # width / height, log-uniform
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear"

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if self.size < 1:
            yield f"size: {self.size}; at least 1 pixel"
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            yield f"scale: {list(self.scale)}; 0 < least <= largest <= 1 is expected"
        if not 0 < self.ratio[0] <= self.ratio[1]:
            yield f"ratio: {list(self.ratio)}; 0 < least <= largest is expected"

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        crop = image.crop(self.draw_box(image.size, rng))
        return crop.resize((self.size, self.size), RESAMPLING[self.interpolation])

    def draw_box(
        self, size: tuple[int, int], rng: np.random.Generator
    ) -> tuple[int, int, int, int]:
        """(left, top, right, bottom) within an image of ``size`` (width, height)."""
        width, height = size
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(TRIES):
            area = width * height * (self.scale[0] + (self.scale[1] - self.scale[0]) * rng.random())
            ratio = math.exp(low + (high - low) * rng.random())
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                left = int(rng.random() * (width - w + 1))
                top = int(rng.random() * (height - h + 1))
                return left, top, left + w, top + h
        return self._centre_box(width, height)

    def _centre_box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """The largest crop in the middle whose aspect ratio is allowed."""
        w, h = width, height
        if width / height < self.ratio[0]:
            h = min(height, round(width / self.ratio[0]))
        elif width / height > self.ratio[1]:
            w = min(width, round(height * self.ratio[1]))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h


@register_transform("resize")
@dataclass(frozen=True, kw_only=True)
class Resize:
    """Resize the shorter side to ``size``, keeping the aspect ratio."""

    size: int  # pixels
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear"

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if self.size < 1:
            yield f"size: {self.size}; at least 1 pixel"

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        width, height = image.size
        if width <= height:
            target = (self.size, max(1, int(self.size * height / width)))
        else:
            target = (max(1, int(self.size * width / height)), self.size)
        if target == image.size:
            return image
        return image.resize(target, RESAMPLING[self.interpolation])


@register_transform("center_crop")
@dataclass(frozen=True, kw_only=True)
class CenterCrop:
    """The square in the middle; a smaller image is padded with black first."""

    size: int  # pixels

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if self.size < 1:
            yield f"size: {self.size}; at least 1 pixel"

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        image = _pad_to(image, self.size)
        left = round((image.size[0] - self.size) / 2)
        top = round((image.size[1] - self.size) / 2)
        return image.crop((left, top, left + self.size, top + self.size))


@register_transform("random_crop")
@dataclass(frozen=True, kw_only=True)
class RandomCrop:
    """A square at a random place, after padding with black on all sides."""

    size: int  # pixels
    padding: int = 0  # pixels on each side; 4 for CIFAR

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if self.size < 1:
            yield f"size: {self.size}; at least 1 pixel"
        if self.padding < 0:
            yield f"padding: {self.padding}; 0 or more pixels"

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        if self.padding:
            image = ImageOps.expand(image, self.padding)
        image = _pad_to(image, self.size)
        left = int(rng.random() * (image.size[0] - self.size + 1))
        top = int(rng.random() * (image.size[1] - self.size + 1))
        return image.crop((left, top, left + self.size, top + self.size))


def _pad_to(image: Image.Image, size: int) -> Image.Image:
    """Black around the image until each side has at least ``size`` pixels."""
    width, height = max(image.size[0], size), max(image.size[1], size)
    if (width, height) == image.size:
        return image
    left, top = (width - image.size[0]) // 2, (height - image.size[1]) // 2
    return image.crop((-left, -top, width - left, height - top))
