"""Frequency of Python's garbage collector: rare while a command starts, normal in training.

Importing torch creates a million permanent objects, which the collector would visit repeatedly.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_USUAL = gc.get_threshold()
_SELDOM = (50_000, 20, 100)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Context with rare garbage collection, for a whole command."""
    before = gc.get_threshold()
    gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def usually_collected() -> Iterator[None]:
    """Context with normal garbage collection, since cycles may keep large tensors alive.

    Objects that exist at its start are excluded (``gc.freeze``), so that loader workers continue to
    share their memory with this process.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_USUAL)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
