"""Automatic augmentation: random operations from a table, as in torchvision.

The operations are Pillow's, so the image size is kept. ``interpolation`` and ``fill`` apply to the
geometric operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import cv2
import numpy as np

from selftask.config.fields import setting
from selftask.data.transforms import color, tones
from selftask.data.transforms.channels import needs_rgb
from selftask.data.transforms.geometry import inverse_affine
from selftask.data.transforms.policy_tables import (
    COLORS,
    GEOMETRY,
    MIX,
    NEUTRAL,
    RAND,
    SIGNED,
    TABLES,
    WIDE,
    Strengths,
    magnitude,
)
from selftask.data.transforms.resampling import warp
from selftask.data.transforms.transform import SCALARS, UNMOVED, Matrix, Resampled, after
from selftask.registry import register_transform

Operation = tuple[str, float]  # name and signed magnitude
ALL = (*NEUTRAL, *GEOMETRY, *COLORS, *TABLES)
POLICY_BINS = 10  # magnitude bins of AutoAugment
INSTEAD = "use aug_mix with all_ops: false, or random_choice of others"
MIX_BINS = 10  # magnitude bins of AugMix, most severe last


@dataclass(frozen=True, kw_only=True)
class _Policy(Resampled):
    """Base class of transforms that apply a sequence of random operations."""

    name: ClassVar[str]  # under which it is registered

    interpolation: Literal["bilinear", "bicubic", "nearest"] = "nearest"
    """Interpolation of the geometric operations."""

    def channel_problems(self, channels: int) -> Iterator[str]:
        return needs_rgb(f"name: {self.name} changes saturation and", channels, INSTEAD)

    def apply(self, image: np.ndarray, params: tuple[Operation, ...]) -> np.ndarray:
        return perform(image, params, self.interpolation, self.fill)

    def source_matrix(self, params: tuple[Operation, ...], height: int, width: int) -> Matrix:
        matrix = UNMOVED
        for name, size in params:
            if name in GEOMETRY:
                matrix = after(affine_of(name, size, height, width), matrix)
        return matrix


@register_transform("rand_augment")
@dataclass(frozen=True, kw_only=True)
class RandAugment(_Policy):
    """Apply several random operations of the same magnitude (arXiv:1909.13719)."""

    name = "rand_augment"

    num_ops: int = setting(2, min=1)
    """Number of operations, applied one after the other."""
    magnitude: int = setting(9, min=0)
    """Magnitude bin, from 0 to ``num_bins`` - 1."""
    num_bins: int = setting(31, min=2)
    """Number of magnitude bins."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if self.magnitude >= self.num_bins:
            yield f"magnitude: {self.magnitude}; 0 to {self.num_bins - 1} (num_bins) is expected"

    def draw(self, rng: np.random.Generator, height: int, width: int) -> tuple[Operation, ...]:
        level = self.magnitude / (self.num_bins - 1)
        draws = rng.random((self.num_ops, 2)).tolist()
        return tuple(
            _signed(ALL[int(which * len(ALL))], level, sign, height, width, RAND)
            for which, sign in draws
        )


@register_transform("trivial_augment_wide")
@dataclass(frozen=True, kw_only=True)
class TrivialAugmentWide(_Policy):
    """Apply one random operation of a random magnitude (arXiv:2103.10158)."""

    name = "trivial_augment_wide"

    num_bins: int = setting(31, min=2)
    """Number of magnitude bins."""

    def draw(self, rng: np.random.Generator, height: int, width: int) -> tuple[Operation, ...]:
        which, strength, sign = rng.random(3).tolist()
        level = int(strength * self.num_bins) / (self.num_bins - 1)
        return (_signed(ALL[int(which * len(ALL))], level, sign, height, width, WIDE),)


@register_transform("auto_augment")
@dataclass(frozen=True, kw_only=True)
class AutoAugment(_Policy):
    """Apply one of 25 pairs of operations, learned for a data set (arXiv:1805.09501)."""

    name = "auto_augment"

    policy: Literal["imagenet", "cifar10", "svhn"] = "imagenet"
    """Data set for which the policy was learned."""

    def draw(self, rng: np.random.Generator, height: int, width: int) -> tuple[Operation, ...]:
        which, *draws = rng.random(5).tolist()
        pair = self._pairs[int(which * len(self._pairs))]
        return tuple(
            _signed(name, (bin_ or 0) / (POLICY_BINS - 1), sign, height, width, RAND)
            for (name, p, bin_), chance, sign in zip(pair, draws[:2], draws[2:], strict=True)
            if chance < p
        )

    @cached_property
    def _pairs(self) -> list[Any]:
        """Pairs of operations as (name, probability, bin or None), from torchvision."""
        from torchvision.transforms import AutoAugment as Published
        from torchvision.transforms import AutoAugmentPolicy

        return Published(AutoAugmentPolicy(self.policy)).policies


@register_transform("aug_mix")
@dataclass(frozen=True, kw_only=True)
class AugMix(Resampled):
    """Average the image and the results of random chains of operations (arXiv:1912.02781)."""

    affine: ClassVar[bool] = False

    severity: int = setting(3, min=1, max=10)
    """Number of magnitude bins to draw from: the first ``severity`` bins out of 10."""
    num_chains: int = setting(3, min=1)
    """Number of chains of operations that are mixed."""
    depth: int | None = setting(None, min=1)
    """Number of operations in each chain; null: 1 to 3 at random."""
    alpha: float = setting(1.0, above=0)
    """Parameter of the Dirichlet and Beta distributions of the weights."""
    all_ops: bool = True
    """Whether brightness, color, contrast and sharpness are among the operations; the paper
    excludes them.
    """

    def channel_problems(self, channels: int) -> Iterator[str]:
        if self.all_ops:
            yield from needs_rgb("all_ops: true changes saturation and", channels, "use false")

    def draw(
        self, rng: np.random.Generator, height: int, width: int
    ) -> tuple[np.ndarray, list[tuple[Operation, ...]]]:
        """Return weights (1 + num_chains,) of image and chains, which sum to 1, and the chains."""
        kept, mixed = rng.dirichlet([self.alpha] * 2).tolist()
        weights = np.array([kept, *(mixed * rng.dirichlet([self.alpha] * self.num_chains))])
        return weights, [self._chain(rng, height, width) for _ in range(self.num_chains)]

    def _chain(self, rng: np.random.Generator, height: int, width: int) -> tuple[Operation, ...]:
        names = (*GEOMETRY, *TABLES, *(COLORS if self.all_ops else ()))
        depth = self.depth or 1 + int(3 * rng.random())
        chain = []
        for which, strength, sign in rng.random((depth, 3)).tolist():
            level = int(strength * self.severity) / (MIX_BINS - 1)
            name = names[int(which * len(names))]
            chain.append(_signed(name, level, sign, height, width, MIX))
        return tuple(chain)

    def apply(
        self, image: np.ndarray, params: tuple[np.ndarray, list[tuple[Operation, ...]]]
    ) -> np.ndarray:
        weights, chains = params
        mixed = image * np.float32(weights[0])
        for weight, chain in zip(weights[1:], chains, strict=True):
            changed = perform(image, chain, self.interpolation, self.fill)
            cv2.scaleAdd(changed.astype(np.float32), float(weight), mixed, dst=mixed)
        return np.rint(mixed, out=mixed).astype(np.uint8)


def _signed(
    name: str, level: float, sign: float, height: int, width: int, strengths: Strengths
) -> Operation:
    size = magnitude(name, level, height, width, strengths)
    return name, -size if name in SIGNED and sign < 0.5 else size


def perform(
    image: np.ndarray, operations: tuple[Operation, ...], interpolation: str, fill: int
) -> np.ndarray:
    """Apply operations in sequence to an image, uint8 (H, W, C).

    Args:
        image: uint8 (H, W, C).
        operations: Names and signed magnitudes, in the units of ``magnitude``.
        interpolation: ``bilinear``, ``bicubic`` or ``nearest``, for geometric operations.
        fill: Gray level of pixels from outside the image.
    """
    for name, size in operations:
        if name in GEOMETRY:
            matrix = affine_of(name, size, *image.shape[:2])
            image = warp(image, matrix, interpolation, fill)
        else:
            image = _TONES[name](image, size)
    return image


def affine_of(name: str, size: float, height: int, width: int) -> tuple[float, ...]:
    """Return the matrix (2x3, row by row) from output to input coordinates.

    Shear keeps the upper left corner in place.

    Args:
        name: Name of a geometric operation.
        size: Its signed magnitude, in the unit of ``magnitude``.
        height: Height of the image, in pixels.
        width: Width of the image, in pixels.
    """
    if name == "Rotate":
        return inverse_affine((width, height), -size, 1.0, (0.0, 0.0), SCALARS)
    pixels = -int(round(size, 3))  # rounded first, so that 15.999... is 16
    return {
        "ShearX": (1.0, size, 0.0, 0.0, 1.0, 0.0),
        "ShearY": (1.0, 0.0, 0.0, size, 1.0, 0.0),
        "TranslateX": (1.0, 0.0, pixels, 0.0, 1.0, 0.0),
        "TranslateY": (1.0, 0.0, 0.0, 0.0, 1.0, pixels),
    }[name]


_TONES: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "Identity": lambda image, _: image,
    "Brightness": lambda image, size: color.adjust_brightness(image, 1 + size),
    "Color": lambda image, size: color.adjust_saturation(image, 1 + size),
    "Contrast": lambda image, size: color.adjust_contrast(image, 1 + size),
    "Sharpness": lambda image, size: tones.adjust_sharpness(image, 1 + size),
    "Posterize": lambda image, size: tones.posterize(image, int(size)),
    "Solarize": tones.solarize,
    "AutoContrast": lambda image, _: tones.autocontrast(image),
    "Equalize": lambda image, _: tones.equalize(image),
    "Invert": lambda image, _: cv2.bitwise_not(image),
}
