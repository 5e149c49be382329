"""What is the user's to mend: these end a command with a message, never with a traceback."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class UserError(Exception):
    """Something only the user can put right; the message says what was wrong and what is right."""

    exit_code = 2


class RunError(Exception):
    """A run that went wrong in a way we understand: its message is enough, no traceback."""


class ConfigError(UserError):
    """Everything that is wrong with a config, together: one problem a line."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


def describe_exit(code: int | None) -> str:
    """How a process went: ``was killed by SIGKILL``, ``ended with code 3``."""
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def plural(noun: str, number: int) -> str:
    """The noun as it stands after this number: ``1 image``, ``0 images``."""
    return noun if number == 1 else f"{noun}s"


def shorten(text: str, most: int = 200) -> str:
    """A text that is quoted in a message, without its middle if it is long."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}...{text[-most // 4 :]} ({len(text)} characters)"


def nearest(name: str, known: Iterable[str], *, show: int = 12) -> str:
    """The hint that follows a wrong name: ``did you mean 'moco'?`` or the known names."""
    known = sorted(known)
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    listed = ", ".join(known[:show]) + (", ..." if len(known) > show else "")
    return f"known: {listed}" if known else "there are none"


def nearest_path(path: str | Path) -> str:
    """The same for a path that is not there, from the deepest of its folders that is."""
    missing = Path(path)
    while not os.path.isdir(missing.parent):
        missing = missing.parent
    try:
        beside = [str(missing.parent / name) for name in os.listdir(missing.parent)]
    except OSError:  # a hint must not become an error of its own
        beside = []
    return nearest(str(missing), beside, show=6)
