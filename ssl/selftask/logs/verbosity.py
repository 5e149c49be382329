"""Verbosity of the console: ``--quiet`` and ``--verbose``.

Ranks, runs of a sweep and submitted jobs inherit it through an environment variable. ``--quiet``
does not shorten ``log.txt``; ``--verbose`` adds DEBUG lines to it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from selftask.errors import printable

VARIABLE = "SELFTASK_VERBOSITY"
DETAIL = 15  # logging level of lines that the terminal shows only if verbose
_LEVELS = {"quiet": logging.ERROR, "verbose": logging.DEBUG}


def console_level() -> int:
    """Return the lowest logging level that is printed: DEBUG, INFO (the default) or ERROR."""
    return _LEVELS.get(os.environ.get(VARIABLE, ""), logging.INFO)


def is_quiet() -> bool:
    """Return whether only errors and the result are printed."""
    return console_level() > logging.INFO


def is_verbose() -> bool:
    """Return whether details, such as those of start-up, are printed."""
    return console_level() < logging.INFO


def announce(text: str) -> None:
    """Print a line that is not a command's result, unless ``--quiet``."""
    if not is_quiet():
        print(printable(text), flush=True)


@contextmanager
def verbosity(word: str | None) -> Iterator[None]:
    """Context that sets the verbosity of this process and of the processes that it starts.

    Args:
        word: ``quiet``, ``verbose``, or None to keep the value of the environment variable.
    """
    before = os.environ.get(VARIABLE)
    if word is not None:
        os.environ[VARIABLE] = word
    try:
        yield
    finally:
        if before is not None:
            os.environ[VARIABLE] = before
        elif word is not None:
            os.environ.pop(VARIABLE, None)
