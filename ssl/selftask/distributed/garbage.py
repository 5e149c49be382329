"""How often Python's garbage collector runs: seldom while a command starts, as usual in training.

Importing torch creates a million objects that stay. The collector would visit them again and again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_USUAL = gc.get_threshold()
_SELDOM = (50_000, 20, 100)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Context in which cycles are looked for seldom; for a whole command."""
    before = gc.get_threshold()
    gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def usually_collected() -> Iterator[None]:
    """Context in which cycles are looked for as usual; in training one may hold large tensors.

    Objects that exist at its start are left out (``gc.freeze``), so that loader workers go on
    sharing their memory with this process.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_USUAL)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
