"""Color, blur and contrast on 8-bit images, clipped after each operation like torchvision.

Images of three channels are processed by the compiled kernel, and batches on the device by the
torch versions in ``data/device``. The OpenCV versions are for other numbers of channels and for
installations without the kernel. torch would take 20 to 80 times as long for one image on the CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import cv2
import numpy as np

from selftask.config.fields import setting
from selftask.data.kernel import MAX_SIGMA, Op
from selftask.data.transforms.channels import RGB, by_groups, needs_rgb
from selftask.data.transforms.tones import solarize
from selftask.data.transforms.transform import RandomlyApplied, UniformTransform
from selftask.registry import register_transform

LUMA = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R 601), as in Pillow and torchvision
ORDERS = tuple(itertools.permutations(range(4)))  # of brightness, contrast, saturation and hue


class Jitter(NamedTuple):
    """Parameters of ``color_jitter``."""

    brightness: Any  # factors; numbers, or arrays for a batch
    contrast: Any
    saturation: Any
    turn: Any  # shift of the hue, as a fraction of the color circle
    order_number: Any  # index into ORDERS

    @property
    def order(self) -> tuple[int, ...]:
        """Operations in their order: 0 brightness, 1 contrast, 2 saturation, 3 hue."""
        return ORDERS[self.order_number]


@register_transform("color_jitter")
@dataclass(frozen=True, kw_only=True)
class ColorJitter(UniformTransform):
    """Change brightness, contrast, saturation and hue randomly, in random order.

    Contrast is changed relative to the mean luma, or to the mean of all values if there are not
    three channels.
    """

    num_uniforms: ClassVar[int] = 6

    brightness: float = setting(0.0, min=0)
    """Brightness factors are drawn from 1 - brightness (at least 0) to 1 + brightness."""
    contrast: float = setting(0.0, min=0)
    """Contrast factors are drawn from 1 - contrast (at least 0) to 1 + contrast."""
    saturation: float = setting(0.0, min=0)
    """Saturation factors are drawn from 1 - saturation (at least 0) to 1 + saturation."""
    hue: float = setting(0.0, min=0, max=0.5)
    """Largest hue shift in either direction, as a fraction of the color circle."""
    p: float = setting(1.0, min=0, max=1)
    """Probability that the transform is applied."""

    def channel_problems(self, channels: int) -> Iterator[str]:
        for key in ("saturation", "hue"):
            if getattr(self, key) and self.p:
                yield from needs_rgb(f"{key}: {getattr(self, key)}", channels, "use 0")

    def params_of(self, uniforms: Sequence[Any], height: Any, width: Any, xp: Any) -> Any:
        chance, of_brightness, of_contrast, of_saturation, of_turn, of_order = uniforms
        (low_b, span_b), (low_c, span_c), (low_s, span_s) = self._ranges
        jitter = Jitter(
            low_b + span_b * of_brightness,
            low_c + span_c * of_contrast,
            low_s + span_s * of_saturation,
            self.hue * (2 * of_turn - 1),
            xp.floor(of_order * len(ORDERS)),
        )
        return chance < self.p, jitter

    @cached_property
    def _ranges(self) -> list[tuple[float, float]]:
        """Lower end and width of each factor's range."""
        strengths = self.brightness, self.contrast, self.saturation
        lows = [max(0.0, 1.0 - strength) for strength in strengths]
        return [(low, 1.0 + one - low) for low, one in zip(lows, strengths, strict=True)]

    def numbers(self, params: Jitter | None) -> Sequence[float]:
        """Return the factors of brightness, contrast and saturation, and the hue shift.

        The shift is a fraction of the color circle. If the image is unchanged: 1, 1, 1, 0.
        """
        return (1.0, 1.0, 1.0, 0.0) if params is None else params[:4]

    def apply(self, image: np.ndarray, params: Jitter) -> np.ndarray:
        strengths = (self.brightness, self.contrast, self.saturation, self.hue)
        for operation in params.order:
            if strengths[operation]:
                image = _ADJUST[operation](image, params[operation])
        return image

    def program(self, params: Jitter) -> Sequence[float]:
        strengths = (self.brightness, self.contrast, self.saturation, self.hue)
        program: list[float] = []
        for operation in params.order:
            if strengths[operation]:
                program += _STEPS[operation](params[operation])
        return program


@register_transform("grayscale")
@dataclass(frozen=True, kw_only=True)
class Grayscale(RandomlyApplied):
    """Replace each channel by the luma, with probability p."""

    p: float = setting(0.1, min=0, max=1)
    """Probability that the transform is applied."""

    def channel_problems(self, channels: int) -> Iterator[str]:
        if self.p:
            yield from needs_rgb(f"p: {self.p}; grayscale", channels, "use 0, or leave it out")

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        return cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)

    def program(self, params: Any) -> Sequence[float]:
        return (Op.GRAY,)


@register_transform("gaussian_blur")
@dataclass(frozen=True, kw_only=True)
class GaussianBlur(UniformTransform):
    """Blur with a Gaussian of random sigma, with probability p.

    The kernel size is computed from sigma, as by Pillow's filter, which the code of MoCo and DINO
    uses. Pillow approximates the Gaussian by box filters; this transform does not. BYOL's code has
    a kernel of a tenth of the image's height for every sigma.
    """

    num_uniforms: ClassVar[int] = 2

    p: float = setting(0.5, min=0, max=1)
    """Probability that the transform is applied."""
    sigma: tuple[float, float] = setting((0.1, 2.0), min=0, rising=True)
    """Range of the standard deviation, in pixels."""

    def params_of(self, uniforms: Sequence[Any], height: Any, width: Any, xp: Any) -> Any:
        """Return whether the image is changed, and sigma in pixels."""
        chance, draw = uniforms
        low, high = self.sigma
        sigma = low + (high - low) * draw
        return (chance < self.p) & (sigma > 0), sigma

    def numbers(self, params: float | None) -> Sequence[float]:
        """Return sigma in pixels; 0 if the image is not blurred."""
        return (params or 0.0,)

    def apply(self, image: np.ndarray, params: float) -> np.ndarray:
        return by_groups(lambda part: cv2.GaussianBlur(part, (0, 0), params), image)

    def program(self, params: float) -> Sequence[float] | None:
        return (Op.BLUR, params) if params <= MAX_SIGMA else None


@register_transform("solarize")
@dataclass(frozen=True, kw_only=True)
class Solarize(RandomlyApplied):
    """Invert the values that are at least ``threshold``, with probability p."""

    p: float = setting(0.2, min=0, max=1)
    """Probability that the transform is applied."""
    threshold: int = setting(128, min=0, max=256)
    """Lowest value that is inverted; 256 inverts none."""

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        return solarize(image, self.threshold)

    def program(self, params: Any) -> Sequence[float]:
        return (Op.SOLARIZE, self.threshold)


@register_transform("contrast_noise")
@dataclass(frozen=True, kw_only=True)
class ContrastNoise(UniformTransform):
    """Change contrast and brightness randomly and add noise: x * factor + offset + noise.

    Values are on the scale [0, 1], and results are clipped to it. The noise models that of a camera
    sensor. It is the same in all channels, so that gray pixels stay gray.
    """

    num_uniforms: ClassVar[int] = 2

    contrast: tuple[float, float] = setting((1.0, 1.0), min=0, rising=True)
    """Range of the factor, which changes the contrast."""
    offset: tuple[float, float] = setting((0.0, 0.0), rising=True)
    """Range of the offset, on the scale [0, 1]."""
    noise: float = setting(0.0, min=0)
    """Standard deviation of the noise, on the scale [0, 1]."""

    def params_of(self, uniforms: Sequence[Any], height: Any, width: Any, xp: Any) -> Any:
        """Return True and the pair (factor, offset), the offset on the scale [0, 255]."""
        factor, offset = uniforms
        factor = self.contrast[0] + (self.contrast[1] - self.contrast[0]) * factor
        offset = self.offset[0] + (self.offset[1] - self.offset[0]) * offset
        return True, (factor, 255 * offset)

    def draw(
        self, rng: np.random.Generator, height: int, width: int
    ) -> tuple[float, float, np.ndarray | None]:
        """Return the factor, the offset, and the noise (H, W, 1) or None.

        Offset and noise are on the scale [0, 255].
        """
        factor, offset = super().draw(rng, height, width)
        noise = None
        if self.noise:
            noise = rng.standard_normal((height, width, 1), dtype=np.float32)
            noise *= np.float32(255 * self.noise)
        return factor, offset, noise

    def apply(
        self, image: np.ndarray, params: tuple[float, float, np.ndarray | None]
    ) -> np.ndarray:
        factor, offset, noise = params
        values = image * np.float32(factor)
        values += np.float32(offset) if noise is None else noise + np.float32(offset)
        np.rint(values, out=values)
        return np.clip(values, 0, 255, out=values).astype(np.uint8)


def adjust_brightness(image: np.ndarray, factor: float) -> np.ndarray:
    """Multiply all values of an image, uint8 (H, W, C), by a factor; rounded and clipped."""
    if image.shape[2] != RGB:
        return _by_table(image, factor, 0.0)
    return _transformed(image, _matrix(factor))


def adjust_contrast(image: np.ndarray, factor: float) -> np.ndarray:
    """Scale the difference of all values from the mean luma by ``factor``; uint8 (H, W, C).

    The mean is rounded as by Pillow. If there are not three channels, the mean of all values is
    used instead.
    """
    if image.shape[2] != RGB:
        return _by_table(image, factor, (1 - factor) * int(image.mean() + 0.5))
    red, green, blue, _ = cv2.mean(image)
    mean = int(LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue + 0.5)
    return _transformed(image, _matrix(factor, offset=(1 - factor) * mean))


def adjust_saturation(image: np.ndarray, factor: float) -> np.ndarray:
    """Scale the difference of each pixel from its luma by ``factor``; uint8 (H, W, 3)."""
    return _transformed(image, _matrix(factor, 1 - factor))


def adjust_hue(image: np.ndarray, turn: float) -> np.ndarray:
    """Shift the hue of uint8 (H, W, 3) by a fraction of the color circle, in steps of 1/256."""
    hsv: np.ndarray = cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL)
    step = np.array((int(turn * 255) % 256, 0, 0), dtype=np.uint8)
    rows = np.tile(step, image.shape[1]).reshape(image.shape[1], 3)
    hsv += rows  # wraps around like the circle
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)


def _transformed(image: np.ndarray, matrix: tuple[float, ...]) -> np.ndarray:
    return cv2.transform(image, np.array(matrix).reshape(3, 4))


def _by_table(image: np.ndarray, factor: float, shift: float) -> np.ndarray:
    """Return x * factor + shift, in every channel."""
    levels = np.clip(np.rint(np.arange(256) * factor + shift), 0, 255).astype(np.uint8)
    return cv2.LUT(image, levels).reshape(image.shape)


def _matrix(factor: float, of_luma: float = 0.0, offset: float = 0.0) -> tuple[float, ...]:
    """Return 3x4 coefficients, row by row: x * factor + luma(x) * of_luma + offset."""
    red, green, blue = of_luma * LUMA[0], of_luma * LUMA[1], of_luma * LUMA[2]
    return (
        *(factor + red, green, blue, offset),
        *(red, factor + green, blue, offset),
        *(red, green, factor + blue, offset),
    )


_ADJUST = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)
_STEPS: tuple[Callable[[float], Sequence[float]], ...] = (
    lambda factor: (Op.MATRIX, *_matrix(factor)),
    lambda factor: (Op.CONTRAST, factor),
    lambda factor: (Op.MATRIX, *_matrix(factor, 1 - factor)),
    lambda turn: (Op.HUE, turn),
)
