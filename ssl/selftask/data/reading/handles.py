"""Open files that must not be shared between processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_OTHERS: list[Any] = []  # opened by a parent process; never closed here


class PerProcess(Generic[T]):
    """Callable that returns an object, which ``opener`` opens on the first call in each process.

    Only ``opener`` is pickled. It must be a module-level function, or a ``partial`` of one.
    """

    def __init__(self, opener: Callable[[], T]) -> None:
        self._opener = opener
        self._opened: tuple[int, T] | None = None  # process id and object

    def __call__(self) -> T:
        pid = os.getpid()
        if self._opened is not None and self._opened[0] != pid:
            _OTHERS.append(self._opened[1])
            self._opened = None
        if self._opened is None:
            self._opened = (pid, self._opener())
        return self._opened[1]

    def __getstate__(self) -> Callable[[], T]:
        return self._opener

    def __setstate__(self, opener: Callable[[], T]) -> None:
        self._opener, self._opened = opener, None
