"""Colour, blur and contrast; 8-bit with clipping after each operation, as torchvision does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cv2
import numpy as np

from selftask.config.fields import setting
from selftask.data.kernel import MAX_SIGMA, Op
from selftask.data.transforms.channels import RGB, by_groups, needs_rgb
from selftask.data.transforms.tones import solarize
from selftask.data.transforms.transform import RandomlyApplied, Transform
from selftask.registry import register_transform

LUMA = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R 601), as Pillow and torchvision use
_ORDERS = list(itertools.permutations(range(4)))
_EYE = np.eye(3, 4)
_GRAY = np.zeros((3, 4))
_GRAY[:, :3] = LUMA


class Jitter(NamedTuple):
    """Drawn factors; ``order`` is that in which 0 brightness, 1 contrast, 2 saturation, 3 hue."""

    factors: tuple[float, float, float]
    turn: float
    order: tuple[int, ...]


@register_transform("color_jitter")
@dataclass(frozen=True, kw_only=True)
class ColorJitter(Transform):
    """Brightness, contrast, saturation and hue by random factors, in random order.

    Contrast is about the mean luma; where there are not three channels, about the mean of all.
    """

    # factors within 1 +- this, never below 0
    brightness: float = setting(0.0, min=0)
    contrast: float = setting(0.0, min=0)
    saturation: float = setting(0.0, min=0)
    # turn of the colour circle within +- this
    hue: float = setting(0.0, min=0, max=0.5)
    p: float = setting(1.0, min=0, max=1)

    def channel_problems(self, channels: int) -> Iterator[str]:
        for key in ("saturation", "hue"):
            if getattr(self, key) and self.p:
                yield from needs_rgb(f"{key}: {getattr(self, key)}", channels, "use 0")

    def draw(self, rng: np.random.Generator, height: int, width: int) -> Jitter | None:
        chance, *draws, turn, order = rng.random(6).tolist()
        if chance >= self.p:
            return None
        strengths = (self.brightness, self.contrast, self.saturation)
        brightness, contrast, saturation = map(_factor, strengths, draws)
        turn = self.hue * (2 * turn - 1)
        return Jitter((brightness, contrast, saturation), turn, _ORDERS[int(order * len(_ORDERS))])

    def numbers(self, params: Jitter | None) -> Sequence[float]:
        """Factors of brightness, contrast and saturation, and turn of the hue."""
        return (1.0, 1.0, 1.0, 0.0) if params is None else (*params.factors, params.turn)

    def apply(self, image: np.ndarray, params: Jitter) -> np.ndarray:
        strengths = (self.brightness, self.contrast, self.saturation, self.hue)
        for operation in params.order:
            if not strengths[operation]:
                continue
            if operation == 3:
                image = adjust_hue(image, params.turn)
            else:
                image = _ADJUST[operation](image, params.factors[operation])
        return image

    def program(self, params: Jitter) -> Sequence[float]:
        strengths = (self.brightness, self.contrast, self.saturation, self.hue)
        program: list[float] = []
        for operation in params.order:
            if strengths[operation]:
                program += _STEPS[operation]((*params.factors, params.turn)[operation])
        return program


@register_transform("grayscale")
@dataclass(frozen=True, kw_only=True)
class Grayscale(RandomlyApplied):
    """Three equal channels of luma, with probability p."""

    p: float = setting(0.1, min=0, max=1)

    def channel_problems(self, channels: int) -> Iterator[str]:
        if self.p:
            yield from needs_rgb(f"p: {self.p}; grayscale", channels, "use 0, or leave it out")

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        return cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)

    def program(self, params: Any) -> Sequence[float]:
        return (Op.GRAY,)


@register_transform("gaussian_blur")
@dataclass(frozen=True, kw_only=True)
class GaussianBlur(Transform):
    """Blur by a random sigma, with probability p.

    The true Gaussian, cut off where it no longer counts: no kernel size to choose, as with
    Pillow's filter in MoCo's, BYOL's and DINO's code, which comes close to it by box filters.
    """

    p: float = setting(0.5, min=0, max=1)
    sigma: tuple[float, float] = (0.1, 2.0)  # pixels

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if not 0 <= self.sigma[0] <= self.sigma[1]:
            yield f"sigma: {list(self.sigma)}; 0 <= least <= largest is expected"

    def draw(self, rng: np.random.Generator, height: int, width: int) -> float | None:
        """Sigma in pixels."""
        chance, draw = rng.random(2).tolist()
        low, high = self.sigma
        sigma = low + (high - low) * draw
        return sigma if chance < self.p and sigma > 0 else None

    def numbers(self, params: float | None) -> Sequence[float]:
        """Sigma in pixels; 0 if the image is not blurred."""
        return (params or 0.0,)

    def apply(self, image: np.ndarray, params: float) -> np.ndarray:
        return by_groups(lambda part: cv2.GaussianBlur(part, (0, 0), params), image)

    def program(self, params: float) -> Sequence[float] | None:
        return (Op.BLUR, params) if params <= MAX_SIGMA else None


@register_transform("solarize")
@dataclass(frozen=True, kw_only=True)
class Solarize(RandomlyApplied):
    """Invert the values from ``threshold`` on, with probability p."""

    p: float = setting(0.2, min=0, max=1)
    threshold: int = setting(128, min=0, max=256)  # 0..256

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        return solarize(image, self.threshold)

    def program(self, params: Any) -> Sequence[float]:
        return (Op.SOLARIZE, self.threshold)


@register_transform("contrast_noise")
@dataclass(frozen=True, kw_only=True)
class ContrastNoise(Transform):
    """Random contrast, brightness offset and sensor noise: x * factor + offset + noise.

    On the scale [0, 1], clipped to it. The noise is the same in all channels, so gray stays gray.
    """

    contrast: tuple[float, float] = (1.0, 1.0)  # the factor's range
    offset: tuple[float, float] = (0.0, 0.0)  # its range
    noise: float = setting(0.0, min=0)  # standard deviation

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if not 0 <= self.contrast[0] <= self.contrast[1]:
            yield f"contrast: {list(self.contrast)}; 0 <= least <= largest is expected"
        if not self.offset[0] <= self.offset[1]:
            yield f"offset: {list(self.offset)}; least <= largest is expected"

    def draw(
        self, rng: np.random.Generator, height: int, width: int
    ) -> tuple[float, float, np.ndarray | None]:
        """Factor, offset, and the noise (H, W, 1), on the scale [0, 255]."""
        factor, offset = rng.random(2).tolist()
        factor = self.contrast[0] + (self.contrast[1] - self.contrast[0]) * factor
        offset = self.offset[0] + (self.offset[1] - self.offset[0]) * offset
        noise = None
        if self.noise:
            noise = rng.standard_normal((height, width, 1), dtype=np.float32)
            noise *= np.float32(255 * self.noise)
        return factor, 255 * offset, noise

    def apply(
        self, image: np.ndarray, params: tuple[float, float, np.ndarray | None]
    ) -> np.ndarray:
        factor, offset, noise = params
        values = image * np.float32(factor)
        values += np.float32(offset) if noise is None else noise + np.float32(offset)
        np.rint(values, out=values)
        return np.clip(values, 0, 255, out=values).astype(np.uint8)


def adjust_brightness(image: np.ndarray, factor: float) -> np.ndarray:
    """x * factor."""
    if image.shape[2] != RGB:
        return _by_table(image, factor, 0.0)
    return cv2.transform(image, factor * _EYE)


def adjust_contrast(image: np.ndarray, factor: float) -> np.ndarray:
    """Away from (factor above 1) or towards the mean luma, which is rounded as Pillow does.

    Where there are not three channels, towards the mean of them all.
    """
    if image.shape[2] != RGB:
        return _by_table(image, factor, (1 - factor) * int(image.mean() + 0.5))
    red, green, blue, _ = cv2.mean(image)
    mean = int(LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue + 0.5)
    matrix = factor * _EYE
    matrix[:, 3] = (1 - factor) * mean
    return cv2.transform(image, matrix)


def adjust_saturation(image: np.ndarray, factor: float) -> np.ndarray:
    """Away from (factor above 1) or towards each pixel's luma."""
    return cv2.transform(image, factor * _EYE + (1 - factor) * _GRAY)


def adjust_hue(image: np.ndarray, turn: float) -> np.ndarray:
    """Turn the hue by a fraction of the colour circle, in steps of 1/256."""
    hsv: np.ndarray = cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL)
    step = np.array((int(turn * 255) % 256, 0, 0), dtype=np.uint8)
    rows = np.tile(step, image.shape[1]).reshape(image.shape[1], 3)
    hsv += rows  # wraps around, as the circle does
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)


def _by_table(image: np.ndarray, factor: float, shift: float) -> np.ndarray:
    """x * factor + shift, in every channel."""
    levels = np.clip(np.rint(np.arange(256) * factor + shift), 0, 255).astype(np.uint8)
    return cv2.LUT(image, levels).reshape(image.shape)


def _factor(strength: float, draw: float) -> float:
    low = max(0.0, 1.0 - strength)
    return low + (1.0 + strength - low) * draw


def _brightness_step(factor: float) -> Sequence[float]:
    return (Op.MATRIX, factor, 0, 0, 0, 0, factor, 0, 0, 0, 0, factor, 0)


def _saturation_step(factor: float) -> Sequence[float]:
    red, green, blue = ((1 - factor) * weight for weight in LUMA)
    return (
        Op.MATRIX,
        *(factor + red, green, blue, 0),
        *(red, factor + green, blue, 0),
        *(red, green, factor + blue, 0),
    )


_ADJUST = (adjust_brightness, adjust_contrast, adjust_saturation)
_STEPS: tuple[Callable[[float], Sequence[float]], ...] = (
    _brightness_step,
    lambda factor: (Op.CONTRAST, factor),
    _saturation_step,
    lambda turn: (Op.HUE, turn),
)
