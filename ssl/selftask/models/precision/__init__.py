"""Full precision for norms, softmaxes, assignments and losses."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from selftask.batch import Batch

P = ParamSpec("P")
R = TypeVar("R")

_HALF = (torch.float16, torch.bfloat16)

# Whether autocast is enabled for any device. Asking for one device by name takes ten times as long.
# The function is not public, hence the fallback.
_any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def to_float32(x: Tensor) -> Tensor:
    """Return ``x`` in at least float32: lower precision is converted, float64 is unchanged."""
    return x if x.dtype == torch.float64 else x.float()


def in_full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to run outside autocast, with half-precision tensors as float32.

    Converting the arguments alone is not enough for a loss with a matrix product: autocast is
    enabled while the loss is computed, and would round both factors again (to 3 digits in
    bfloat16).

    Tensors may be in tuples, lists and dicts. In a ``Batch``, such as the second argument of a
    method's ``forward``, only values added by ``prepare_batch`` and ``on_forward`` are converted.
    Without autocast, nothing is converted if the first argument, or the one after ``self``, is a
    tensor in full precision.

    Raises:
        TypeError: If no positional argument is or contains a tensor.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        for first in args[:2]:  # the second if the function is a method
            if isinstance(first, Tensor):
                if not _any_autocast() and first.dtype not in _HALF:
                    return function(*args, **kwargs)  # fast path of every float32 step
                break
        tensors = [tensor for argument in args for tensor in _tensors(argument)]
        if not tensors:
            raise TypeError(
                f"in_full_precision: no argument of {function.__qualname__} is a tensor or "
                "contains one; give tensors by position"
            )
        if not _any_autocast() and not any(tensor.dtype in _HALF for tensor in tensors):
            return function(*args, **kwargs)
        device = tensors[0].device.type
        autocast = torch.is_autocast_enabled(device)
        raised: Any = [_raise(argument) for argument in args]
        named: Any = {name: _raise(argument) for name, argument in kwargs.items()}
        with torch.autocast(device, enabled=False) if autocast else nullcontext():
            return function(*raised, **named)

    return run


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Batch):
        yield from _tensors(value.added)
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _raise(value: Any) -> Any:
    """Return a value with its half-precision tensors converted to float32."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALF else value
    if isinstance(value, Batch):
        batch = copy.copy(value)
        batch.added = _raise(value.added)
        return batch
    if isinstance(value, dict):
        return {key: _raise(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_raise(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
