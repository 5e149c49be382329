"""Nested containers of tensors and plain values: the state in a checkpoint."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor

Keys = tuple[Any, ...]  # keys that lead to an item of nested containers

_SCALARS = (bool, int, float, str, type(None))


def check_plain(value: Any, key: str = "state") -> None:
    """Raise TypeError for the first value that ``torch.load(weights_only=True)`` may refuse.

    Subclasses are rejected: NumPy's float64 is a float, but ``weights_only`` refuses it.
    """
    if type(value) in (dict, OrderedDict):
        for name, item in value.items():
            check_plain(name, f"a key of {key}")
            check_plain(item, f"{key}.{name}")
    elif type(value) in (list, tuple):
        for number, item in enumerate(value):
            check_plain(item, f"{key}[{number}]")
    elif type(value) not in _SCALARS and not isinstance(value, Tensor):
        raise TypeError(f"{key} is a {type(value).__name__}: checkpoints hold tensors and scalars")


def map_tensors(change: Callable[[Tensor, Keys], Any], value: Any, path: Keys = ()) -> Any:
    """Return new nested containers with each tensor replaced by ``change(tensor, path)``."""
    if isinstance(value, Tensor):
        return change(value, path)
    if isinstance(value, dict):
        fresh = copy.copy(value)  # keeps the attributes of a module's OrderedDict
        for key, item in value.items():
            fresh[key] = map_tensors(change, item, (*path, key))
        return fresh
    if isinstance(value, list | tuple):
        items = enumerate(value)
        return type(value)(map_tensors(change, item, (*path, n)) for n, item in items)
    return value
