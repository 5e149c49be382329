"""How much is printed: ``--quiet`` and ``--verbose`` of commands. ``log.txt`` is always complete.

Ranks, runs of a sweep and submitted jobs inherit the choice as an environment variable.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "SELFTASK_VERBOSITY"
DETAIL = 15  # level of lines of log.txt that the terminal shows only if verbose
_LEVELS = {"quiet": logging.ERROR, "verbose": logging.DEBUG}


def console_level() -> int:
    """Return the level of the least important lines that are printed: INFO, unless asked."""
    return _LEVELS.get(os.environ.get(VARIABLE, ""), logging.INFO)


def is_quiet() -> bool:
    """Return whether only errors and the result are printed."""
    return console_level() > logging.INFO


def is_verbose() -> bool:
    """Return whether details of start-up are printed."""
    return console_level() < logging.INFO


def announce(text: str) -> None:
    """Print a line that is not a command's result, unless ``--quiet``."""
    if not is_quiet():
        print(text, flush=True)


@contextmanager
def verbosity(word: str | None) -> Iterator[None]:
    """Context in which this process, and those that it starts, print as asked.

    Args:
        word: ``quiet``, ``verbose``, or None to keep what the environment says.
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
