"""The transform contract: draw parameters from a generator, then apply them to an image."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

Matrix = tuple[float, ...]  # of an affine map, 2x3, row by row
UNMOVED: Matrix = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)


def after(first: Matrix, second: Matrix) -> Matrix:
    """Return the affine map that does ``first``, then ``second``."""
    a, b, c, d, e, f = first
    g, h, i, j, k, m = second
    return (
        *(g * a + h * d, g * b + h * e, g * c + h * f + i),
        *(j * a + k * d, j * b + k * e, j * c + k * f + m),
    )


# The part of NumPy's namespace that formulas of parameters use, for Python numbers. For one image
# it takes a tenth of NumPy's time.
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
    """One registered operation on 8-bit images; its dataclass fields are its config keys.

    Drawing and applying are separate, so that both engines use the same parameters: the CPU engine
    applies them to one image, the device engine to a batch. A transform of your own may also be
    any callable ``(image, rng) -> image``.
    """

    resizes: ClassVar[str | None] = None
    """What it makes of an image's size: ``"square"``, of ``size`` pixels, or another word; None for
    a transform that keeps it."""
    channels: ClassVar[int] = 3  # of the images; set by the pipeline
    affine: ClassVar[bool] = True  # False: no affine map says where pixels of the result come from

    def channel_problems(self, channels: int) -> Iterator[str]:
        """Yield ``key: why`` for each key that does not work with this number of channels."""
        return iter(())

    @abstractmethod
    def draw(self, rng: np.random.Generator, height: int, width: int) -> Any:
        """Return parameters for an image of this size, or None to leave it unchanged."""

    @abstractmethod
    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        """Return the changed image, uint8 (H', W', C); ``image`` (H, W, C) is read-only."""

    def program(self, params: Any) -> Sequence[float] | None:
        """Return the compiled kernel's program (``data/kernel``), or None if it has no such op."""
        return None

    def source_matrix(self, params: Any, height: int, width: int) -> Matrix:
        """Return the affine map from the result to the image, which has that size, in pixels.

        Pixel (0, 0) reaches from 0 to 1. By default pixels stay where they are.
        """
        return UNMOVED

    def numbers(self, params: Any) -> Sequence[float]:
        """Return what ``batch.draws`` has of the parameters: always as many numbers.

        ``params`` is None for an image that the transform does not change. By default there are
        none.
        """
        return ()

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        params = self.draw(rng, *image.shape[:2])
        return image if params is None else self.apply(image, params)


class UniformTransform(Transform):
    """A transform whose parameters are a formula of a fixed number of uniforms.

    The formula is written once: for one image it gets numbers, for a batch arrays.
    """

    num_uniforms: ClassVar[int]

    @abstractmethod
    def params_of(self, uniforms: Sequence[Any], height: Any, width: Any, xp: Any) -> Any:
        """Compute parameters from uniforms in [0, 1).

        Args:
            uniforms: ``num_uniforms`` numbers, or as many arrays (N,).
            height: of the image in pixels; a number or an array (N,).
            width: likewise.
            xp: ``SCALARS`` or NumPy.

        Returns:
            Whether the image is changed, and the parameters: a number or a flat tuple of them,
            each an array (N,) for a batch.
        """

    def draw(self, rng: np.random.Generator, height: int, width: int) -> Any:
        count = self.num_uniforms
        uniforms = (rng.random(),) if count == 1 else rng.random(count).tolist()
        chosen, params = self.params_of(uniforms, height, width, SCALARS)
        return params if chosen else None


class RandomlyApplied(UniformTransform):
    """A transform that is applied with probability ``p`` and has no other random parameters."""

    num_uniforms: ClassVar[int] = 1
    p: float

    def params_of(self, uniforms: Sequence[Any], height: Any, width: Any, xp: Any) -> Any:
        return uniforms[0] < self.p, ()

    def numbers(self, params: Any) -> Sequence[float]:
        """1 if the image is changed, else 0."""
        return (float(params is not None),)


class Deterministic(Transform):
    """A transform without randomness."""

    def draw(self, rng: np.random.Generator, height: int, width: int) -> Any:
        return ()
