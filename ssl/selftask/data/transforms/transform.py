"""The transform contract: draw parameters from a generator, then apply them to an image."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from selftask.config.fields import setting

Matrix = tuple[float, ...]  # affine map, 2x3, row by row
UNMOVED: Matrix = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)


def after(first: Matrix, second: Matrix) -> Matrix:
    """Return the affine map that applies ``first``, then ``second``."""
    a, b, c, d, e, f = first
    g, h, i, j, k, m = second
    return (
        *(g * a + h * d, g * b + h * e, g * c + h * f + i),
        *(j * a + k * d, j * b + k * e, j * c + k * f + m),
    )


class Drawn(NamedTuple):
    """A transform of a view, with the parameters drawn for one image."""

    transform: Transform
    params: Any
    """Parameters from ``Transform.draw``; None: the image is left unchanged."""
    size: tuple[int, int]
    """Height and width of the image before the transform."""


class Trace(NamedTuple):
    """All draws of one view of one image."""

    steps: list[Drawn]
    size: tuple[int, int]
    """Height and width of the view."""


# The functions of NumPy that parameter formulas use, for Python numbers. For one image they take a
# tenth of NumPy's time.
SCALARS = SimpleNamespace(
    exp=math.exp,
    sqrt=math.sqrt,
    cos=math.cos,
    sin=math.sin,
    tan=math.tan,
    radians=math.radians,
    floor=math.floor,
    rint=round,
    maximum=max,
    minimum=min,
)


class Transform(ABC):
    """Base class of transforms of 8-bit images; the dataclass fields are the config keys.

    Drawing and applying are separate, so that the result does not depend on where views are made:
    on the CPU, parameters are applied to one image, on the device to a batch. A user's transform
    may also be any callable ``(image, rng) -> image``.
    """

    resizes: ClassVar[str | None] = None
    """How the image size changes. ``"square"``: to ``size`` x ``size`` pixels, unless ``size`` is
    None; None: the size is kept; any other string: in another way."""
    channels: ClassVar[int] = 3  # of the images; set by the pipeline
    is_random: ClassVar[bool | str] = True
    """Whether views of an image may differ; ``"p"``: only if ``p`` is neither 0 nor 1."""
    affine: ClassVar[bool] = True  # whether ``source_matrix`` describes where pixels come from

    def channel_problems(self, channels: int) -> Iterator[str]:
        """Yield ``key: why`` for each key that does not work with this number of channels."""
        return iter(())

    @abstractmethod
    def draw(self, rng: np.random.Generator, height: int, width: int) -> Any:
        """Return parameters for an image of this size, or None to leave it unchanged.

        Args:
            rng: Generator of all random numbers.
            height: Height of the image, in pixels.
            width: Width of the image, in pixels.
        """

    @abstractmethod
    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        """Return the changed image, uint8 (H', W', C); ``image`` (H, W, C) is read-only."""

    def program(self, params: Any) -> Sequence[float] | None:
        """Return a program for the compiled kernel (``data/kernel``), or None if not supported.

        It is only requested for images of three channels.
        """
        return None

    def source_matrix(self, params: Any, height: int, width: int) -> Matrix:
        """Return the affine map from output to input coordinates, in pixels.

        Pixel (0, 0) covers coordinates from 0 to 1. By default it is the identity.

        Args:
            params: Parameters from ``draw``.
            height: Height of the input image, in pixels.
            width: Width of the input image, in pixels.
        """
        return UNMOVED

    def numbers(self, params: Any) -> Sequence[float]:
        """Return the drawn parameters as numbers for ``batch.draws``; by default, there are none.

        ``params`` is None if the image is unchanged. The length of the result must not depend on
        ``params``.
        """
        return ()

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        params = self.draw(rng, *image.shape[:2])
        return image if params is None else self.apply(image, params)


class UniformTransform(Transform):
    """Transform whose parameters are a function of a fixed number of uniform random numbers.

    The same formula computes them for one image from numbers, and for a batch from arrays.
    """

    num_uniforms: ClassVar[int]

    @abstractmethod
    def params_of(self, uniforms: Sequence[Any], height: Any, width: Any, xp: Any) -> Any:
        """Compute parameters from uniforms in [0, 1).

        Args:
            uniforms: ``num_uniforms`` numbers, or as many arrays (N,).
            height: Height of the image in pixels, a number or an array (N,).
            width: Width of the image in pixels, a number or an array (N,).
            xp: Math functions: ``SCALARS`` for numbers, NumPy for arrays.

        Returns:
            Whether the image is changed, and the parameters: a number or a flat tuple of numbers.
            For a batch, each of them is an array (N,).
        """

    def draw(self, rng: np.random.Generator, height: int, width: int) -> Any:
        count = self.num_uniforms
        uniforms = (rng.random(),) if count == 1 else rng.random(count).tolist()
        chosen, params = self.params_of(uniforms, height, width, SCALARS)
        return params if chosen else None


class RandomlyApplied(UniformTransform):
    """Transform that is applied with probability ``p`` and has no other random parameters."""

    num_uniforms: ClassVar[int] = 1
    is_random: ClassVar[bool | str] = "p"
    p: float

    def params_of(self, uniforms: Sequence[Any], height: Any, width: Any, xp: Any) -> Any:
        return uniforms[0] < self.p, ()

    def numbers(self, params: Any) -> Sequence[float]:
        """Return 1 if the image is changed, else 0."""
        return (float(params is not None),)


@dataclass(frozen=True, kw_only=True)
class Resampled(Transform):
    """Base class of transforms that interpolate pixels; pixels outside the image get ``fill``."""

    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear"
    """Interpolation between pixels of the input."""
    fill: int = setting(0, min=0, max=255)
    """Gray level of pixels from outside the image."""


@dataclass(frozen=True, kw_only=True)
class Toggled(RandomlyApplied):
    """Transform that is applied with probability 0.5 by default."""

    p: float = setting(0.5, min=0, max=1)
    """Probability that the transform is applied."""


class Deterministic(Transform):
    """Transform without randomness."""

    is_random: ClassVar[bool | str] = False

    def draw(self, rng: np.random.Generator, height: int, width: int) -> Any:
        return ()


class Nested(ABC):
    """Base class of transforms that apply other transforms."""

    channels: ClassVar[int] = 3  # of the images; set by the pipeline

    @abstractmethod
    def __call__(
        self, image: np.ndarray, rng: np.random.Generator, steps: list[Drawn] | None = None
    ) -> np.ndarray:
        """Return the changed image; append the draws of the inner transforms to ``steps``."""

    @abstractmethod
    def inner(self) -> list[Any]:
        """Return all transforms directly inside this one, whether they are applied or not."""
