"""Packing of a batch's parameters into one tensor."""

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
    """Parameters of all images of a batch in one view."""

    canvas: tuple[int, int]
    """Largest height and width of the images before the view's transforms."""
    ragged: bool
    """Whether these sizes differ between the images."""
    steps: list[Any]
    """For each transform, its arrays by name, or the list of parameters of a user's transform."""


class Position(NamedTuple):
    """Position of an array in ``Packed.numbers``."""

    first: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Packed:
    """Parameters of a batch in one tensor, so that one copy takes them to the device."""

    numbers: Tensor  # (n,) float32; other types are reinterpreted
    views: list[ViewParameters]  # with a Position for each array
    view_sizes: list[tuple[int, int]]  # height and width of each view of the batch

    def to(self, device: torch.device) -> Packed:
        """Copy the numbers to the device asynchronously."""
        return replace(self, numbers=self.numbers.to(device, non_blocking=True))

    def pin_memory(self) -> Packed:
        """Copy the numbers to page-locked memory."""
        return replace(self, numbers=self.numbers.pin_memory())

    def step(self, view: int, number: int) -> Any:
        """Return the parameters of one transform of a view, as tensors by name, or its list."""
        step = self.views[view].steps[number]
        return step if isinstance(step, list) else {n: self._at(at) for n, at in step.items()}

    def _at(self, position: Position) -> Tensor:
        first, shape, dtype = position
        size = math.prod(shape)
        words = self.numbers[first : first + -(-size * dtype.itemsize // 4)]
        return words.view(dtype)[:size].view(shape)


def pack(views: list[ViewParameters], view_sizes: list[tuple[int, int]]) -> Packed:
    """Concatenate all arrays; uint8 and int16 keep their type, other types become float32."""
    words: list[np.ndarray] = [np.zeros(0, np.float32)]
    length = 0

    def put(array: np.ndarray) -> Position:
        nonlocal length
        kept = array.dtype in (np.uint8, np.int16)
        array = np.ascontiguousarray(array if kept else array.astype(np.float32))
        data = array.reshape(-1).view(np.uint8)
        words.append(np.pad(data, (0, -len(data) % 4)).view(np.float32))
        position = Position(length, array.shape, getattr(torch, array.dtype.name))
        length += len(words[-1])
        return position

    def put_all(step: Arrays | list[Any]) -> Any:
        return step if isinstance(step, list) else {n: put(array) for n, array in step.items()}

    placed = [replace(view, steps=[put_all(step) for step in view.steps]) for view in views]
    return Packed(torch.from_numpy(np.concatenate(words)), placed, view_sizes)
