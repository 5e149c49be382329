"""When Python looks for unreachable cycles: seldom while a command starts, as usual in training.

Importing torch makes a million objects that stay. To walk them again and again takes a fifth of
the time to the first step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_USUAL = gc.get_threshold()
_SELDOM = (50_000, 20, 100)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Context for a whole command."""
    before = gc.get_threshold()
    gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def usually_collected() -> Iterator[None]:
    """Context for training, where a cycle may hold large tensors.

    What exists already is not walked any more, and so stays in memory that loader workers share
    with this process.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_USUAL)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
