"""Smaller chunks of rows if the memory of the device is full."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from selftask.distributed.accelerator import empty_cache
from selftask.logs import get_logger

log = get_logger(__name__)


class InChunks:
    """Call a function of rows, with half as many rows after each out-of-memory error.

    The number of rows that fits is kept for later calls.

    Args:
        function: Tensors with N rows each -> tensors with N rows each. Rows must be independent,
            and the call local to this rank.
        what: Of the rows, for the log: ``images``.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], what: str) -> None:
        self._function, self._what = function, what
        self._most = sys.maxsize

    def __call__(self, *rows: Tensor) -> tuple[Tensor, ...]:
        parts: list[tuple[Tensor, ...]] = []
        first = 0
        while not parts or first < len(rows[0]):
            chunk = [tensor[first : first + self._most] for tensor in rows]
            try:
                parts.append(self._function(*chunk))
            except torch.OutOfMemoryError:
                if len(chunk[0]) < 2:
                    raise
                self._most = len(chunk[0]) // 2
            else:
                first += len(chunk[0])
                continue
            # only now: inside `except`, the traceback keeps the tensors of the failed call
            log.warning("out of memory: %d %s at a time from now on", self._most, self._what)
            empty_cache(chunk[0].device)
        return parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))
