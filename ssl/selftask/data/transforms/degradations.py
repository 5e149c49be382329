"""Degradations by a camera or a file format: motion, zoom and JPEG, on 8-bit images."""

from __future__ import annotations

import math
from dataclasses import dataclass

import cv2
import numpy as np

from selftask.config.fields import setting
from selftask.data.transforms.channels import RGB, by_groups
from selftask.data.transforms.transform import Transform
from selftask.registry import register_transform

_ZOOMS = 11  # zoomed images that are averaged


@register_transform("motion_blur")
@dataclass(frozen=True, kw_only=True)
class MotionBlur(Transform):
    """Average each pixel along a line of random length and angle, with probability p."""

    length: tuple[float, float] = setting((3.0, 15.0), min=1, rising=True)
    """Range of the length of the line, in pixels."""
    degrees: float = setting(45.0, min=0, max=90)
    """Largest angle of the line with the horizontal in either direction, in degrees."""
    p: float = setting(0.5, min=0, max=1)
    """Probability that the transform is applied."""

    def draw(self, rng: np.random.Generator, height: int, width: int) -> np.ndarray | None:
        """Return the kernel, float64 (K, K), or None for no blur."""
        chance, length, angle = rng.random(3).tolist()
        if chance >= self.p:
            return None
        length = self.length[0] + (self.length[1] - self.length[0]) * length
        return line_kernel(round(length), math.radians(self.degrees * (2 * angle - 1)))

    def apply(self, image: np.ndarray, params: np.ndarray) -> np.ndarray:
        return by_groups(lambda part: cv2.filter2D(part, -1, params), image)


@register_transform("zoom_blur")
@dataclass(frozen=True, kw_only=True)
class ZoomBlur(Transform):
    """Average an image and ten enlarged versions of it, with probability p."""

    zoom: tuple[float, float] = setting((1.0, 1.2), min=1, rising=True)
    """Range of the factor of the largest enlargement."""
    p: float = setting(0.5, min=0, max=1)
    """Probability that the transform is applied."""

    def draw(self, rng: np.random.Generator, height: int, width: int) -> float | None:
        """Return the factor of the largest enlargement, or None."""
        chance, zoom = rng.random(2).tolist()
        return None if chance >= self.p else self.zoom[0] + (self.zoom[1] - self.zoom[0]) * zoom

    def apply(self, image: np.ndarray, params: float) -> np.ndarray:
        return by_groups(lambda part: _zoom_mean(part, params), image)


@register_transform("jpeg")
@dataclass(frozen=True, kw_only=True)
class JPEG(Transform):
    """Compress as JPEG of random quality, with probability p.

    Images that do not have three channels are compressed channel by channel.
    """

    quality: tuple[int, int] = setting((30, 95), min=1, max=100, rising=True)
    """Range of the quality of libjpeg."""
    p: float = setting(0.5, min=0, max=1)
    """Probability that the transform is applied."""

    def draw(self, rng: np.random.Generator, height: int, width: int) -> int | None:
        """Return the quality, or None."""
        chance, quality = rng.random(2).tolist()
        low, high = self.quality
        return None if chance >= self.p else low + int((high - low + 1) * quality)

    def apply(self, image: np.ndarray, params: int) -> np.ndarray:
        if image.shape[2] == RGB:
            coded = _coded(cv2.cvtColor(image, cv2.COLOR_RGB2BGR), params)
            return cv2.cvtColor(coded, cv2.COLOR_BGR2RGB)
        planes = np.ascontiguousarray(image.transpose(2, 0, 1))
        return np.stack([_coded(plane, params) for plane in planes], axis=2)


def line_kernel(length: int, angle: float) -> np.ndarray:
    """Return the kernel, float64 (K, K), of the mean over ``length`` points of a centered line.

    Points are one pixel apart, and each is interpolated bilinearly.

    Args:
        length: Number of points, at least 1.
        angle: Angle of the line with the horizontal, in radians.
    """
    steps = np.arange(length) - (length - 1) / 2
    reach = math.ceil((length - 1) / 2) + 1
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1))
    points = reach + np.stack([steps * math.sin(angle), steps * math.cos(angle)])
    low = np.floor(points).astype(int)
    rest = points - low
    for down in (0, 1):
        for right in (0, 1):
            weight = np.abs(1 - down - rest[0]) * np.abs(1 - right - rest[1])
            np.add.at(kernel, (low[0] + down, low[1] + right), weight / length)
    return kernel


def _zoom_mean(image: np.ndarray, largest: float) -> np.ndarray:
    height, width = image.shape[:2]
    total = np.zeros(image.shape, dtype=np.float32)
    for zoom in np.linspace(1, largest, _ZOOMS):
        matrix = cv2.getRotationMatrix2D(((width - 1) / 2, (height - 1) / 2), 0, zoom)
        total += cv2.warpAffine(image.astype(np.float32), matrix, (width, height))
    return np.rint(total / _ZOOMS).clip(0, 255).astype(np.uint8)


def _coded(image: np.ndarray, quality: int) -> np.ndarray:
    """Return an image (H, W, 3), blue first, or (H, W) after compression."""
    _, data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])
    return np.asarray(cv2.imdecode(data, cv2.IMREAD_UNCHANGED))
