"""Packing of a batch's parameters, which are trees of arrays, into one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Arrays or tensors with one entry per image, lists with one entry per image (parameters of a user's
# transform), and dicts and Steps of these.
Tree = Any


@dataclass(frozen=True)
class Step:
    """Arrays of one operation."""

    packed: Tree
    canvas: tuple[int, int]  # largest height and width of the images afterwards
    ragged: bool  # whether sizes differ before the operation


@dataclass(frozen=True)
class Steps:
    """Arrays of a sequence of operations."""

    canvas: tuple[int, int]  # largest height and width of the images before them
    steps: tuple[Step, ...]


class Place(NamedTuple):
    """Position of an array in ``Packed.numbers``."""

    first: int
    shape: tuple[int, ...]
    kind: torch.dtype


@dataclass(frozen=True)
class Packed:
    """Parameters of a batch in one tensor, so that one copy takes them to the device."""

    numbers: Tensor  # (n,) float32; other types are reinterpreted
    views: list[Steps]  # with a Place for each array

    def to(self, device: torch.device) -> Packed:
        """Copy the numbers to the device asynchronously."""
        return replace(self, numbers=self.numbers.to(device, non_blocking=True))

    def pin_memory(self) -> Packed:
        """Copy the numbers to page-locked memory."""
        return replace(self, numbers=self.numbers.pin_memory())

    def steps(self, view: int, rows: slice = slice(None)) -> Steps:
        """Return the steps of a view, for the images in ``rows``."""

        def find(leaf: Any) -> Any:
            if isinstance(leaf, list):
                return leaf[rows]
            size = math.prod(leaf.shape) * leaf.kind.itemsize
            words = self.numbers[leaf.first : leaf.first + -(-size // 4)]
            return words.view(leaf.kind)[: math.prod(leaf.shape)].view(leaf.shape)[rows]

        steps: Steps = mapped(self.views[view], find)
        return steps


def pack(views: list[Steps]) -> Packed:
    """Concatenate all arrays; uint8 and int16 keep their type, other types become float32."""
    words: list[np.ndarray] = []
    length = 0

    def put(leaf: Any) -> Any:
        nonlocal length
        if isinstance(leaf, list):
            return leaf
        small = leaf.dtype in (np.uint8, np.int16)
        array = np.ascontiguousarray(leaf if small else leaf.astype(np.float32))
        data = array.reshape(-1).view(np.uint8)
        data = np.pad(data, (0, -len(data) % 4)) if len(data) % 4 else data
        place = Place(length, array.shape, getattr(torch, array.dtype.name))
        words.append(data.view(np.float32))
        length += len(words[-1])
        return place

    placed = [mapped(view, put) for view in views]
    return Packed(torch.from_numpy(np.concatenate([*words, np.zeros(0, np.float32)])), placed)


def mapped(tree: Tree, change: Callable[[Any], Any]) -> Tree:
    """Apply ``change`` to each array, list or ``Place`` of a tree, and return the new tree."""
    if isinstance(tree, dict):
        return {name: mapped(one, change) for name, one in tree.items()}
    if isinstance(tree, Steps):
        return replace(tree, steps=tuple(mapped(one, change) for one in tree.steps))
    if isinstance(tree, Step):
        return replace(tree, packed=mapped(tree.packed, change))
    return change(tree)


def take(tree: Tree, rows: Tensor) -> Tree:
    """Return the tree for the images in ``rows``, which are on the host."""

    def of(leaf: Any) -> Any:
        return [leaf[row] for row in rows.tolist()] if isinstance(leaf, list) else leaf[rows]

    return mapped(tree, of)


def spread(tree: Tree, rows: np.ndarray, count: int) -> Tree:
    """Extend a tree for the images in ``rows`` to ``count`` images.

    The other images get the entry of the first image in ``rows``. It is valid and never used. In
    lists they get None.
    """
    source = np.zeros(count, dtype=np.int64)
    source[rows] = np.arange(len(rows))

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, list):
            return leaf[source]
        own: list[Any] = [None] * count
        for row, one in zip(rows.tolist(), leaf, strict=True):
            own[row] = one
        return own

    return mapped(tree, of)
