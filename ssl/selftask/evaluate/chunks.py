"""Run a function on smaller chunks of rows after out-of-memory errors."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from selftask.distributed.accelerator import empty_cache
from selftask.logs import get_logger

log = get_logger(__name__)


class InChunks:
    """Wrapper that calls a function on chunks of rows, halved after each out-of-memory error.

    Later calls start with the size that fits. If even one row does not fit, the error is raised.

    Args:
        function: Tensors with N rows each -> tensors with N rows each. Rows must be independent,
            and the function must not communicate between ranks.
        noun: Word for the rows in the log, such as ``images``.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], noun: str) -> None:
        self._function, self._noun = function, noun
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
            # Only now: inside `except`, the traceback keeps the tensors of the failed call alive.
            log.warning("out of memory: %d %s at a time from now on", self._most, self._noun)
            empty_cache(chunk[0].device)
        return parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))
