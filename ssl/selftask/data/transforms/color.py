"""Colour, blur and contrast; 8-bit with clipping after each operation, as torchvision does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from selftask.data.transforms.normalize import to_float
from selftask.registry import register_transform


@register_transform("color_jitter")
@dataclass(frozen=True, kw_only=True)
class ColorJitter:
    """Brightness, contrast, saturation and hue by random factors, in random order."""

    brightness: float = 0.0  # factor within 1 +- this, never below 0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0  # turn of the colour circle within +- this, at most 0.5
    p: float = 1.0

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        for key in ("brightness", "contrast", "saturation"):
            if getattr(self, key) < 0:
                yield f"{key}: {getattr(self, key)}; 0 or more is expected"
        if not 0 <= self.hue <= 0.5:
            yield f"hue: {self.hue}; 0 to 0.5 is expected"
        if not 0 <= self.p <= 1:
            yield f"p: {self.p}; a probability is expected"

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        if rng.random() >= self.p:
            return image
        strengths = (self.brightness, self.contrast, self.saturation)
        factors = [_factor(strength, rng) for strength in strengths]
        turn = self.hue * (2 * rng.random() - 1)
        for operation in rng.permutation(4).tolist():
            if operation == 3:
                image = adjust_hue(image, turn) if self.hue else image
            elif strengths[operation]:
                image = _ENHANCERS[operation](image).enhance(factors[operation])
        return image


@register_transform("grayscale")
@dataclass(frozen=True, kw_only=True)
class Grayscale:
    """Three equal channels of luma, with probability p."""

    p: float = 0.1

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if not 0 <= self.p <= 1:
            yield f"p: {self.p}; a probability is expected"

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        if rng.random() >= self.p:
            return image
        luma = image.convert("L")
        return Image.merge("RGB", (luma, luma, luma))


@register_transform("gaussian_blur")
@dataclass(frozen=True, kw_only=True)
class GaussianBlur:
    """Blur by a random sigma, with probability p.

    Pillow's filter, as in MoCo's, BYOL's and DINO's code: three box filters that come close to the
    Gaussian, without a kernel size to choose.
    """

    p: float = 0.5
    sigma: tuple[float, float] = (0.1, 2.0)  # pixels

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if not 0 <= self.p <= 1:
            yield f"p: {self.p}; a probability is expected"
        if not 0 <= self.sigma[0] <= self.sigma[1]:
            yield f"sigma: {list(self.sigma)}; 0 <= least <= largest is expected"

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        if rng.random() >= self.p:
            return image
        sigma = self.sigma[0] + (self.sigma[1] - self.sigma[0]) * rng.random()
        return image.filter(ImageFilter.GaussianBlur(sigma))


@register_transform("solarize")
@dataclass(frozen=True, kw_only=True)
class Solarize:
    """Invert the values from ``threshold`` on, with probability p."""

    p: float = 0.2
    threshold: int = 128  # 0..256

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if not 0 <= self.p <= 1:
            yield f"p: {self.p}; a probability is expected"

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        return ImageOps.solarize(image, self.threshold) if rng.random() < self.p else image


@register_transform("contrast_noise")
@dataclass(frozen=True, kw_only=True)
class ContrastNoise:
    """Random contrast, brightness offset and sensor noise: x * factor + offset + noise.

    On the scale [0, 1], clipped to it. The noise is the same in the three channels, so gray stays
    gray. Gives floats: only ``normalize`` may come after it.
    """

    contrast: tuple[float, float] = (1.0, 1.0)  # the factor's range
    offset: tuple[float, float] = (0.0, 0.0)  # its range
    noise: float = 0.0  # standard deviation

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if not 0 <= self.contrast[0] <= self.contrast[1]:
            yield f"contrast: {list(self.contrast)}; 0 <= least <= largest is expected"
        if not self.offset[0] <= self.offset[1]:
            yield f"offset: {list(self.offset)}; least <= largest is expected"
        if self.noise < 0:
            yield f"noise: {self.noise}; 0 or more is expected"

    def __call__(self, image: Image.Image | np.ndarray, rng: np.random.Generator) -> np.ndarray:
        factor, offset = rng.random(2).tolist()
        factor = self.contrast[0] + (self.contrast[1] - self.contrast[0]) * factor
        offset = self.offset[0] + (self.offset[1] - self.offset[0]) * offset
        values: np.ndarray = to_float(image) * np.float32(factor)
        if self.noise:
            noise = rng.standard_normal(values.shape[1:], dtype=np.float32)
            noise *= np.float32(self.noise)
            noise += np.float32(offset)
            values += noise
        else:
            values += np.float32(offset)
        np.clip(values, 0.0, 1.0, out=values)
        return values


def adjust_hue(image: Image.Image, turn: float) -> Image.Image:
    """Turn the hue by a fraction of the colour circle, in steps of 1/256."""
    hue, saturation, value = image.convert("HSV").split()
    shift = int(turn * 255)
    hue = hue.point([(level + shift) % 256 for level in range(256)])
    return Image.merge("HSV", (hue, saturation, value)).convert("RGB")


def _factor(strength: float, rng: np.random.Generator) -> float:
    low = max(0.0, 1.0 - strength)
    return low + (1.0 + strength - low) * rng.random()


_ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
