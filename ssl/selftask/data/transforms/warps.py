"""Shear, perspective and elastic distortion; each resamples the image once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import cv2
import numpy as np

from selftask.config.fields import setting
from selftask.data.transforms.channels import by_groups
from selftask.data.transforms.geometry import RandomMatrix
from selftask.data.transforms.resampling import MODES
from selftask.data.transforms.transform import Resampled
from selftask.registry import register_transform

_HALF = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])  # pixel centers at .5
_BACK = np.array([[1, 0, -0.5], [0, 1, -0.5], [0, 0, 1]])


@register_transform("random_shear")
@dataclass(frozen=True, kw_only=True)
class RandomShear(RandomMatrix):
    """Shear randomly about the center, like torchvision's RandomAffine."""

    num_uniforms: ClassVar[int] = 2

    x: float = setting(0.0, min=0, below=90)
    """Largest shear angle along the x axis in either direction, in degrees."""
    y: float = setting(0.0, min=0, below=90)
    """Largest shear angle along the y axis in either direction, in degrees."""

    def params_of(self, uniforms: Sequence[Any], height: Any, width: Any, xp: Any) -> Any:
        """Return True, and the matrix (2x3, row by row) from output to input coordinates."""
        x, y = uniforms
        b, d = (
            xp.tan(xp.radians(most * (2 * one - 1))) for most, one in ((self.x, x), (self.y, y))
        )
        a, left, top = 1 + b * d, width / 2, height / 2
        return True, (a, b, left - a * left - b * top, d, 1.0, top - d * left - top)


@register_transform("random_perspective")
@dataclass(frozen=True, kw_only=True)
class RandomPerspective(Resampled):
    """Apply a random perspective, with probability p, like torchvision's RandomPerspective."""

    affine: ClassVar[bool] = False

    distortion: float = setting(0.5, min=0, max=1)
    """Largest inward shift of a corner, as a fraction of half a side."""
    p: float = setting(0.5, min=0, max=1)
    """Probability that the transform is applied."""

    def draw(self, rng: np.random.Generator, height: int, width: int) -> np.ndarray | None:
        """Return x and y of the new corners, (4, 2) in pixels, clockwise from the upper left.

        None if the image stays unchanged.
        """
        chance, *draws = rng.random(9).tolist()
        if chance >= self.p or min(height, width) < 2:  # corners coincide
            return None
        room = np.array([int(self.distortion * (side // 2)) for side in (width, height)])
        inwards = np.floor(np.array(draws).reshape(4, 2) * (room + 1))
        corners = corners_of(height, width)
        return np.where(corners == 0, inwards, corners - inwards)

    def apply(self, image: np.ndarray, params: np.ndarray) -> np.ndarray:
        height, width = image.shape[:2]
        corners = corners_of(height, width)
        to_input = cv2.getPerspectiveTransform(params.astype(np.float32), corners)

        def change(part: np.ndarray) -> np.ndarray:
            return cv2.warpPerspective(
                part,
                _BACK @ to_input @ _HALF,
                (width, height),
                flags=MODES[self.interpolation] | cv2.WARP_INVERSE_MAP,
                borderMode=cv2.BORDER_CONSTANT,
                borderValue=(self.fill,) * 4,
            )

        return by_groups(change, image)


@register_transform("elastic")
@dataclass(frozen=True, kw_only=True)
class Elastic(Resampled):
    """Displace pixels smoothly, with probability p, like torchvision's ElasticTransform.

    Much slower than the other transforms: two numbers are drawn for each pixel.
    """

    affine: ClassVar[bool] = False

    alpha: float = setting(50.0, min=0)
    """Strength: displacements are drawn from -alpha / 2 to alpha / 2 pixels, then smoothed."""
    sigma: float = setting(5.0, above=0)
    """Standard deviation of the smoothing, in pixels."""
    p: float = setting(0.5, min=0, max=1)
    """Probability that the transform is applied."""

    def draw(self, rng: np.random.Generator, height: int, width: int) -> np.ndarray | None:
        """Return x and y offsets from each pixel to its source, float32 (2, H, W), or None."""
        if rng.random() >= self.p:
            return None
        noise = 2 * rng.random((2, height, width), dtype=np.float32) - 1
        side = int(8 * self.sigma + 1) | 1
        smooth = [cv2.GaussianBlur(plane, (side, side), self.sigma) for plane in noise]
        return np.stack(smooth) * np.float32(self.alpha / 2)

    def apply(self, image: np.ndarray, params: np.ndarray) -> np.ndarray:
        height, width = image.shape[:2]
        across = params[0] + np.arange(width, dtype=np.float32)
        down = params[1] + np.arange(height, dtype=np.float32)[:, None]

        def change(part: np.ndarray) -> np.ndarray:
            return cv2.remap(
                part,
                across,
                down,
                MODES[self.interpolation],
                borderMode=cv2.BORDER_CONSTANT,
                borderValue=(self.fill,) * 4,
            )

        return by_groups(change, image)


def corners_of(height: int, width: int) -> np.ndarray:
    """Return (x, y) of the corner pixels, clockwise from the upper left, float32 (4, 2)."""
    right, bottom = width - 1, height - 1
    return np.array([[0, 0], [right, 0], [right, bottom], [0, bottom]], dtype=np.float32)
