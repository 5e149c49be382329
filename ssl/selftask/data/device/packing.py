"""The draws of a batch on their way to the device: trees of arrays, which travel as one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Arrays or tensors with an entry an image, lists with one (the draws of a user's transform), and
# dicts and Steps of these.
Tree = Any


@dataclass(frozen=True)
class Step:
    """What one operation needs of a batch."""

    packed: Tree
    canvas: tuple[int, int]  # height and width of the largest image afterwards
    ragged: bool  # whether sizes differ before it


@dataclass(frozen=True)
class Steps:
    """What operations one after the other need."""

    canvas: tuple[int, int]  # height and width of the largest image before them
    steps: tuple[Step, ...]


class Place(NamedTuple):
    """Where an array lies in ``Packed.numbers``."""

    first: int
    shape: tuple[int, ...]
    kind: torch.dtype


@dataclass(frozen=True)
class Packed:
    """The draws of a batch in one tensor, so that they travel in one copy."""

    numbers: Tensor  # (n,) float32; other kinds lie in it bit by bit
    views: list[Steps]  # with places for arrays

    def to(self, device: torch.device) -> Packed:
        """The same with the numbers on the device; the host does not wait."""
        return replace(self, numbers=self.numbers.to(device, non_blocking=True))

    def pin_memory(self) -> Packed:
        """The same with the numbers in page-locked memory."""
        return replace(self, numbers=self.numbers.pin_memory())

    def steps(self, view: int, rows: slice = slice(None)) -> Steps:
        """What the operations of a view take, for some of the images."""

        def find(leaf: Any) -> Any:
            if isinstance(leaf, list):
                return leaf[rows]
            size = math.prod(leaf.shape) * leaf.kind.itemsize
            words = self.numbers[leaf.first : leaf.first + -(-size // 4)]
            return words.view(leaf.kind)[: math.prod(leaf.shape)].view(leaf.shape)[rows]

        steps: Steps = mapped(self.views[view], find)
        return steps


def pack(views: list[Steps]) -> Packed:
    """All arrays one after the other: bytes and short numbers as they are, others as float32."""
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
    """The tree with each of its arrays and lists (and places) changed."""
    if isinstance(tree, dict):
        return {name: mapped(one, change) for name, one in tree.items()}
    if isinstance(tree, Steps):
        return replace(tree, steps=tuple(mapped(one, change) for one in tree.steps))
    if isinstance(tree, Step):
        return replace(tree, packed=mapped(tree.packed, change))
    return change(tree)


def take(tree: Tree, rows: Tensor) -> Tree:
    """The tree of some of the images, on the host."""

    def of(leaf: Any) -> Any:
        return [leaf[row] for row in rows.tolist()] if isinstance(leaf, list) else leaf[rows]

    return mapped(tree, of)


def spread(tree: Tree, rows: np.ndarray, count: int) -> Tree:
    """The tree for ``count`` images of one for those in ``rows``, at least one.

    The others get what the first of them has: numbers that make sense, whatever is made of them.
    In a list they get None.
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
