"""What a transform is: parameters drawn from a generator, then applied to an image."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
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


class Transform(ABC):
    """One registered operation on 8-bit images; its dataclass fields are its keys in the config.

    Drawing and applying are apart, so that whoever applies (image by image here, a batch at once
    on a device) does the same with the same draws. A transform of your own may as well be any
    callable ``(image, rng) -> image``.
    """

    channels: ClassVar[int] = 3  # of the images that it is used for; set with them
    affine: ClassVar[bool] = True  # False: no affine map says where pixels of the result come from

    def channel_problems(self, channels: int) -> Iterator[str]:
        """``key: why``, for what it cannot do to images of so many channels."""
        return iter(())

    @abstractmethod
    def draw(self, rng: np.random.Generator, height: int, width: int) -> Any:
        """Parameters for an image of that size; None if it is to stay as it is."""

    @abstractmethod
    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        """The changed image, uint8 (H', W', C), of one (H, W, C), which is left as it was."""

    def program(self, params: Any) -> Sequence[float] | None:
        """The same for the compiled kernel (``data/kernel``); None where it knows no such thing."""
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


class RandomlyApplied(Transform):
    """A transform that draws no more than whether it changes the image, with probability ``p``."""

    p: float

    def draw(self, rng: np.random.Generator, height: int, width: int) -> Any:
        return () if rng.random() < self.p else None

    def numbers(self, params: Any) -> Sequence[float]:
        """1 if the image is changed, else 0."""
        return (float(params is not None),)


class Deterministic(Transform):
    """A transform without randomness."""

    def draw(self, rng: np.random.Generator, height: int, width: int) -> Any:
        return ()
