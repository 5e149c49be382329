"""Batched automatic augmentation: a sequence of operations for each image.

Each operation is given by its kind and up to six numbers. Operations of one kind share a formula:
for example all affine maps, all blends with gray or black, and all inversions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from selftask.data.device.operation import (
    Arrays,
    Images,
    Operation,
    Tensors,
    on_chosen,
    per_image,
    to_levels,
)
from selftask.data.device.transforms.color import posterize, solarize
from selftask.data.device.transforms.geometry import warped
from selftask.data.device.transforms.jitter import adjust
from selftask.data.device.transforms.tones import autocontrast, equalize, sharpen
from selftask.data.transforms.policies import (
    AugMix,
    AutoAugment,
    RandAugment,
    TrivialAugmentWide,
    affine_of,
)
from selftask.data.transforms.policy_tables import GEOMETRY
from selftask.random.views import replayed
from selftask.registry import register_batched_transform

if TYPE_CHECKING:
    from selftask.random.views import Streams

NONE, WARP, BLEND, SHARPEN, POSTERIZE, SOLARIZE, AUTOCONTRAST, EQUALIZE = range(-1, 7)
_KINDS = {
    "Identity": NONE,
    **dict.fromkeys(GEOMETRY, WARP),
    **dict.fromkeys(("Brightness", "Color", "Contrast"), BLEND),
    "Sharpness": SHARPEN,
    "Posterize": POSTERIZE,
    "Solarize": SOLARIZE,
    "Invert": SOLARIZE,  # with threshold 0
    "AutoContrast": AUTOCONTRAST,
    "Equalize": EQUALIZE,
}
_BLENDS = {
    "Brightness": None,
    "Color": 1,
    "Contrast": 2,
}  # index of the weight of luma or mean luma; None: black
_NUMBERS = 6  # per operation: a matrix, three weights, or one number

Drawn = Sequence[tuple[str, float]]  # (name, magnitude) of each operation of an image


class BatchedPolicy(Operation):
    """Base class: a sequence of operations for each image."""

    transform: RandAugment | TrivialAugmentWide | AutoAugment
    num_ops: int  # largest number of operations
    num_draws: int

    def pack(self, params: Sequence[Drawn], sizes: np.ndarray) -> Arrays:
        return packed_operations(params, self.num_ops, sizes)

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        draws = streams.random(self.num_draws)
        return self.pack(replayed(self.transform, draws, sizes), sizes)

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        return perform(images, packed["kind"], packed["numbers"], self.transform)


@register_batched_transform("rand_augment")
class BatchedRandAugment(BatchedPolicy):
    """RandAugment: ``num_ops`` operations."""

    def __init__(self, transform: RandAugment) -> None:
        super().__init__(transform)
        self.num_ops, self.num_draws = transform.num_ops, 2 * transform.num_ops


@register_batched_transform("trivial_augment_wide")
class BatchedTrivialAugment(BatchedPolicy):
    """TrivialAugment: one operation."""

    num_ops, num_draws = 1, 3


@register_batched_transform("auto_augment")
class BatchedAutoAugment(BatchedPolicy):
    """AutoAugment: up to two operations."""

    num_ops, num_draws = 2, 5


@register_batched_transform("aug_mix")
class BatchedAugMix(Operation):
    """AugMix: a weighted mean of the image and of the results of chains of operations."""

    in_place = False
    vectorised = False  # not all of its draws are uniform
    transform: AugMix

    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> Any:
        depth = self.transform.depth or 3
        chains = [
            packed_operations([chains[number] for _, chains in params], depth, sizes)
            for number in range(self.transform.num_chains)
        ]
        weights = np.array([weights for weights, _ in params])
        return {"weights": weights, **{str(at): chain for at, chain in enumerate(chains)}}

    def apply(self, images: Images, packed: Any, canvas: tuple[int, int]) -> Images:
        kept, *weights = packed["weights"].unbind(1)
        mixed = images.values * per_image(kept)
        for number, weight in enumerate(weights):
            copy = images.with_values(images.values.clone())
            chain = packed[str(number)]
            made = perform(copy, chain["kind"], chain["numbers"], self.transform)
            mixed.add_(made.values * per_image(weight))
        return images.with_values(to_levels(mixed))


def packed_operations(params: Sequence[Drawn], most: int, sizes: np.ndarray) -> Arrays:
    """Return the kinds of up to K = ``most`` operations, (B, K), and their numbers, (B, K, 6)."""
    height, width = sizes[0].tolist()
    kind = np.full((len(params), most), NONE)
    numbers = np.zeros((len(params), most, _NUMBERS))
    for row, operations in enumerate(params):
        for place, (name, size) in enumerate(operations):
            kind[row, place] = _KINDS[name]
            own = _numbers(name, size, height, width)
            numbers[row, place, : len(own)] = own
    return {"kind": kind, "numbers": numbers}


def _numbers(name: str, size: float, height: int, width: int) -> Sequence[float]:
    """Return the numbers for the formula of an operation's kind."""
    if name in GEOMETRY:
        return affine_of(name, size, height, width)
    if name in _BLENDS:
        weights, other = [1 + size, 0.0, 0.0], _BLENDS[name]
        if other is not None:
            weights[other] = -size
        return weights
    if name == "Posterize":
        return (2.0 ** (8 - int(size)),)
    if name == "Solarize":
        return (math.ceil(size),)  # float32 rounds values just above a level to it
    return (1 + size if name == "Sharpness" else 0.0,)


def perform(images: Images, kind: Tensor, numbers: Tensor, transform: Any) -> Images:
    """Apply the operations of each image in order; may write into the given values.

    ``transform`` provides ``interpolation`` and ``fill`` for the geometric operations.
    """

    def warp(values: Tensor, numbers: Tensor) -> Tensor:
        return warped(values, numbers, transform)

    changes: dict[int, Callable[[Tensor, Tensor], Tensor]] = {WARP: warp, **_CHANGES}
    for place in range(kind.shape[1]):
        for number, change in changes.items():
            chosen = kind[:, place] == number
            images = on_chosen(images, chosen, change, numbers[:, place])
    return images


_CHANGES: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    BLEND: lambda values, numbers: adjust(values, numbers[:, :3]),
    SHARPEN: lambda values, numbers: sharpen(values, numbers[:, 0]),
    POSTERIZE: lambda values, numbers: posterize(values, per_image(numbers[:, 0])),
    SOLARIZE: lambda values, numbers: solarize(values, per_image(numbers[:, 0])),
    AUTOCONTRAST: lambda values, _: autocontrast(values),
    EQUALIZE: lambda values, _: equalize(values),
}
