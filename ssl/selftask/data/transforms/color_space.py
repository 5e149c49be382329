"""Conversion to other color spaces: Lab, lightness only, BGR."""

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
    """Convert RGB to 8-bit CIE L*a*b*: L * 255 / 100, a + 128, b + 128, as OpenCV does.

    For split-brain autoencoders and contrastive multiview coding (arXiv:1906.05849), in which one
    network gets the first channel and another network the other two. ``normalize`` then needs the
    mean and std of Lab images.
    """

    def channel_problems(self, channels: int) -> Iterator[str]:
        return needs_rgb("name: lab", channels, "leave it out")

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        return cv2.cvtColor(image, cv2.COLOR_RGB2LAB)


@register_transform("lightness")
@dataclass(frozen=True)
class Lightness(Deterministic):
    """Replace each channel by the lightness L* of ``lab``: L * 255 / 100.

    Input of networks that predict colors (arXiv:1603.08511).
    """

    def channel_problems(self, channels: int) -> Iterator[str]:
        return needs_rgb("name: lightness", channels, "leave it out")

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        lightness = cv2.extractChannel(cv2.cvtColor(image, cv2.COLOR_RGB2LAB), 0)
        return cv2.cvtColor(lightness, cv2.COLOR_GRAY2RGB)


@register_transform("bgr")
@dataclass(frozen=True)
class Bgr(Deterministic):
    """Convert RGB to BGR, for networks trained on images as read by OpenCV or Caffe.

    ``normalize`` then needs mean and std in that order.
    """

    def channel_problems(self, channels: int) -> Iterator[str]:
        return needs_rgb("name: bgr", channels, "leave it out")

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        return np.ascontiguousarray(image[..., ::-1])
