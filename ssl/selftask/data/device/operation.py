"""Base classes of batched transforms.

The parameters come from ``Transform.draw``. ``pack`` runs in a worker and turns the parameters of a
batch into arrays. ``apply`` runs on the device. It must not wait for the device, so that it can run
ahead of the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selftask.data.transforms.transform import SCALARS
from selftask.errors import UserError
from selftask.random.views import Streams
from selftask.registry import BATCHED_TRANSFORMS

Arrays = dict[str, np.ndarray]  # parameters by name, (B, ...) each
Tensors = Mapping[str, Tensor]  # the same on the device; float32 or bool


class Operation(ABC):
    """Base class of batched transforms."""

    crops = False  # True if it makes squares of ``size`` pixels, also from images of other sizes
    shares_images = False  # True if ``apply`` accepts fewer images than parameters
    vectorized = True  # True if ``draw`` is implemented, which draws for a whole batch at once
    reads: tuple[str, ...] | None = None
    """Attributes of the transform that ``apply`` depends on, in addition to the arrays: views with
    equal attributes are made together. None: each view is made separately.
    """

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def same(self, other: Operation) -> bool:
        """Return whether ``apply`` of both operations gives the same result for the same arrays."""
        if type(self) is not type(other) or self.reads is None:
            return False
        of = self.transform, other.transform
        return all(getattr(of[0], name) == getattr(of[1], name) for name in self.reads)

    def sizes_after(self, sizes: np.ndarray) -> np.ndarray:
        """Return height and width, int64 (B, 2), of images of these sizes after the operation."""
        return np.full_like(sizes, self.transform.size) if self.crops else sizes

    @abstractmethod
    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> Any:
        """Turn parameters into arrays for ``apply``.

        Args:
            params: Parameters of each image, from ``Transform.draw``; None: unchanged.
            sizes: Height and width of the images, int64 (B, 2).

        Returns:
            Arrays (B, ...) by name, or a list, which is passed to ``apply`` unchanged.
        """

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        """Draw parameters for all images at once and pack them; only if ``vectorized``.

        It takes the same draws from each image's stream as ``Transform.draw``.

        Args:
            streams: Random streams of the images.
            sizes: Height and width of the images, int64 (B, 2).
        """
        raise NotImplementedError(f"{type(self).__name__} draws for one image at a time")

    @abstractmethod
    def apply(self, values: Tensor, packed: Any, sizes: Tensor | None) -> Tensor:
        """Return the changed images, float32 (B, C, H', W'), and leave the given ones unchanged.

        Args:
            values: float32 (B, C, H, W), whole levels 0..255. If the operation ``shares_images``,
                there may be parameters for B * n results: the first n for the first image, and so
                on. B * n images are then returned.
            packed: The arrays of ``pack``, on the device of the images.
            sizes: Height and width of each image in ``values``, float32 (B, 2), for an operation
                that ``crops``; None if the images fill ``values``.
        """


class UniformOperation(Operation):
    """Base class of the batched versions of ``UniformTransform``s."""

    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> Arrays:
        half = [0.5] * self.transform.num_uniforms
        _, other = self.transform.params_of(half, *sizes[0].tolist(), SCALARS)
        chosen = np.array([one is not None for one in params])
        columns = np.array([other if one is None else one for one in params], dtype=np.float64).T
        return self.arrays(chosen, columns, sizes)

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        uniforms = streams.random(self.transform.num_uniforms).T
        chosen, params = self.transform.params_of(uniforms, *sizes.T, np)
        return self.arrays(chosen, params, sizes)

    @abstractmethod
    def arrays(self, chosen: Any, params: Any, sizes: np.ndarray) -> Arrays:
        """Return the arrays that ``apply`` needs.

        Args:
            chosen: Which images are changed, bool (B,), or True for all.
            params: Parameters from ``UniformTransform.params_of``, (B,) each. Unchanged images have
                valid parameters too.
            sizes: Height and width of the images, int64 (B, 2).
        """


class RandomlyApplied(UniformOperation):
    """Base class of batched transforms that are applied with probability ``p``.

    All images are changed, and then each image or its changed version is selected, so that no shape
    depends on a draw.
    """

    reads = ()

    def arrays(self, chosen: Any, params: Any, sizes: np.ndarray) -> Arrays:
        return {"chosen": np.broadcast_to(chosen, len(sizes))}

    def apply(self, values: Tensor, packed: Tensors, sizes: Tensor | None) -> Tensor:
        return torch.where(per_image(packed["chosen"]), self.change(values), values)

    @abstractmethod
    def change(self, values: Tensor) -> Tensor:
        """Return the changed images, (B, C, H, W) or (B, 1, H, W) if all channels are equal.

        The given images, float32 (B, C, H, W) in 0..255, are left unchanged.
        """


class CustomOperation(Operation):
    """Batched version of a user's transform by its ``on_batch``, which must keep the image size.

    ``on_batch(images, params)`` gets float32 images (B, C, H, W) in 0..255, and a list with the
    result of ``draw`` for each image (None: unchanged). It returns the changed images, which are
    then rounded to whole levels. It must not wait for the device (no ``.item()``).
    """

    vectorized = False

    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> list[Any]:
        return list(params)

    def apply(self, values: Tensor, packed: Any, sizes: Tensor | None) -> Tensor:
        changed = self.transform.on_batch(values.clone(), packed)
        if changed.shape != values.shape:
            raise UserError(
                f"{type(self.transform).__name__}.on_batch gave shape {tuple(changed.shape)} for "
                f"{tuple(values.shape)}; the shape has to stay (data.augment_on=cpu has no "
                "such limit)"
            )
        return to_levels(changed.float())


def find_batched_transform(name: str, transform: Any) -> Operation:
    """Return the batched version of a transform that is registered as ``name``.

    A method ``on_batch`` of the transform has priority. Otherwise the version is found by name, not
    by class: a subclass of a built-in transform may draw or do something else.
    """
    if hasattr(transform, "on_batch"):
        return CustomOperation(transform)
    return BATCHED_TRANSFORMS[name](transform)


def to_levels(values: Tensor) -> Tensor:
    """Round images (B, C, H, W) to whole levels and clip them to 0..255, in place."""
    return values.round_().clamp_(0, 255)


def per_image(parameter: Tensor) -> Tensor:
    """Reshape (B,) to (B, 1, 1, 1)."""
    return parameter[:, None, None, None]
