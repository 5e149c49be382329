"""Full precision for norms, softmaxes, assignments and losses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

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
    bfloat16). The first argument must be a tensor.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor)
        if not _any_autocast() and first.dtype not in _HALF:
            return function(*args, **kwargs)  # fast path of every float32 step
        device = first.device.type
        autocast = torch.is_autocast_enabled(device)
        raised: Any = [_raise(argument) for argument in args]
        with torch.autocast(device, enabled=False) if autocast else nullcontext():
            return function(*raised, **kwargs)

    return run


def _raise(argument: object) -> object:
    half = isinstance(argument, Tensor) and argument.dtype in _HALF
    return argument.float() if half else argument  # type: ignore[attr-defined]
