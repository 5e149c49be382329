"""Images in other color spaces: Lab, its lightness alone, BGR.

OpenCV's forms stay beside the device engine's torch forms, which cost thirteen times as much for
one image: ``lab`` takes 142 and 1913 microseconds of CPU time at 224x224 pixels, one thread
(``python tools/bench/transform_forms.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from selftask.data.transforms.channels import needs_rgb
from selftask.data.transforms.transform import Deterministic
from selftask.registry import register_transform


@register_transform("lab")
@dataclass(frozen=True)
class Lab(Deterministic):
    """RGB to CIE L*a*b* in 8 bits: L * 255 / 100, a + 128, b + 128, as OpenCV defines it.

    For split-brain and contrastive multiview coding (arXiv:1906.05849), whose networks see the
    first channel or the other two. ``normalize`` then needs a mean and std of its own.
    """

    def channel_problems(self, channels: int) -> Iterator[str]:
        return needs_rgb("name: lab", channels, "leave it out")

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        return cv2.cvtColor(image, cv2.COLOR_RGB2LAB)


@register_transform("lightness")
@dataclass(frozen=True)
class Lightness(Deterministic):
    """Three equal channels of L*, the lightness of ``lab``: L * 255 / 100.

    The input of networks that predict colors (arXiv:1603.08511).
    """

    def channel_problems(self, channels: int) -> Iterator[str]:
        return needs_rgb("name: lightness", channels, "leave it out")

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        lightness = cv2.extractChannel(cv2.cvtColor(image, cv2.COLOR_RGB2LAB), 0)
        return cv2.cvtColor(lightness, cv2.COLOR_GRAY2RGB)


@register_transform("bgr")
@dataclass(frozen=True)
class Bgr(Deterministic):
    """Blue, green, red: the order of networks trained on images as OpenCV and Caffe read them.

    ``normalize`` then needs its mean and std in that order.
    """

    def channel_problems(self, channels: int) -> Iterator[str]:
        return needs_rgb("name: bgr", channels, "leave it out")

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        return np.ascontiguousarray(image[..., ::-1])
