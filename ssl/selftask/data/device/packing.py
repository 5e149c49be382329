"""Packing of a batch's augmentation parameters into one tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from selftask.data.device.operation import Arrays


@dataclass(frozen=True)
class ViewParameters:
    """Sizes of the images of a batch before the transforms of a view."""

    canvas: tuple[int, int]
    """Largest height and width of the images."""
    ragged: bool
    """Whether the images have different sizes."""


class Position(NamedTuple):
    """Position of an array in ``Packed.numbers``."""

    first: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Packed:
    """Augmentation parameters of a batch in one tensor, which is copied to the device at once."""

    numbers: Tensor  # (n,) float32; bool arrays are stored as their bytes
    views: list[ViewParameters]
    steps: list[Any]  # for each step: Positions by name, or the list of a user's transform
    view_sizes: list[tuple[int, int]]  # height and width of each view of the batch

    def to(self, device: torch.device) -> Packed:
        """Return the parameters with the numbers on the device, copied asynchronously."""
        return replace(self, numbers=self.numbers.to(device, non_blocking=True))

    def pin_memory(self) -> Packed:
        """Return the parameters with the numbers in page-locked memory."""
        return replace(self, numbers=self.numbers.pin_memory())

    def step(self, number: int) -> Any:
        """Return a step's parameters: tensors by name, or the list of a user's transform."""
        step = self.steps[number]
        return step if isinstance(step, list) else {n: self._at(where) for n, where in step.items()}

    def _at(self, position: Position) -> Tensor:
        first, shape, dtype = position
        size = math.prod(shape)
        words = self.numbers[first : first + -(-size * dtype.itemsize // 4)]
        return words.view(dtype)[:size].view(shape)


def pack(
    views: list[ViewParameters], steps: list[Any], view_sizes: list[tuple[int, int]]
) -> Packed:
    """Concatenate the arrays of all steps; bool is kept, other types become float32.

    Args:
        views: Sizes of the images before the transforms of each view.
        steps: Parameters of each step: arrays by name, or the list of a user's transform.
        view_sizes: Height and width of each view of the batch.
    """
    words: list[np.ndarray] = [np.zeros(0, np.float32)]
    length = 0

    def put(array: np.ndarray) -> Position:
        nonlocal length
        array = np.ascontiguousarray(array, bool if array.dtype == bool else np.float32)
        data = array.reshape(-1).view(np.uint8)
        words.append(np.pad(data, (0, -len(data) % 4)).view(np.float32))
        position = Position(length, array.shape, getattr(torch, array.dtype.name))
        length += len(words[-1])
        return position

    def put_all(step: Arrays | list[Any]) -> Any:
        return step if isinstance(step, list) else {n: put(array) for n, array in step.items()}

    placed = [put_all(step) for step in steps]
    return Packed(torch.from_numpy(np.concatenate(words)), views, placed, view_sizes)
