"""Errors that end a command with a message instead of a traceback, and helpers for messages."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path


class UserError(Exception):
    """An error that the user must fix; its message names the wrong value and how to correct it."""

    exit_code = 2


class AddressError(UserError):
    """An address (``s3://bucket/x``) that cannot be read; the message starts with the address."""


EXIT_CODES = {
    "0": "Success: finished, finished before, or back in SLURM's queue.",
    "1": "The run failed; for `check`, `repro` and `data check`: something differs or is broken.",
    "2": "Something the user must fix: a config, a path, data, weights.",
    "75": "Interrupted without a signal, as by `train.stop_at`; the same command resumes the run.",
    "128 + N": "Interrupted by signal N after a checkpoint: 130 by Ctrl-C, 143 by SIGTERM.",
}
"""Exit code -> its meaning, for all commands."""


class RunError(Exception):
    """A failed run with a known cause; its message needs no traceback."""


class StepSkipped(Exception):
    """Raised inside a train step, on all ranks together, to skip it without an update."""


class BadImage(Exception):
    """Raised if an image cannot be read, with its path (or name) and the reason on one line.

    ``storage_failed`` is True if the file system failed, so that the image itself may be intact.
    """

    def __init__(self, path: str, reason: str, *, storage_failed: bool = False) -> None:
        self.path = path
        self.reason = " ".join(reason.split())
        self.storage_failed = storage_failed
        super().__init__(path, self.reason)

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class ConfigError(UserError):
    """All problems of a config; the message has each on a line of its own."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


def message_of(error: BaseException) -> str:
    """Return the message of an error, preceded by its type unless it is a UserError or RunError."""
    is_explained = isinstance(error, UserError | RunError)
    return str(error) if is_explained else f"{type(error).__name__}: {error}"


_GRADIENT_ADVICE = {  # part of torch's message -> advice
    "has been modified by an inplace operation": (
        "a tensor that the backward pass needs was changed in place (x += y, x[i] = y, x.mul_(y)); "
        "write x = x + y, or change a copy, x.clone()"
    ),
    "backward through the graph a second time": (
        "a result of an earlier step was kept with its graph; keep x.detach()"
    ),
    "does not require grad and does not have a grad_fn": (
        "the loss has no gradient; compute it from the output, without detach"
    ),
}


def with_advice(message: str) -> str:
    """Return a message of torch, after a line of advice if it is of a common gradient mistake."""
    advice = [text for part, text in _GRADIENT_ADVICE.items() if part in message]
    return "\n".join([*advice, message])


def reason_of(error: Exception) -> str:
    """Return the message of an error in one line, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def explained(problem: str, *kinds: type[Exception]) -> Iterator[None]:
    """Context manager that converts an error to the UserError ``{problem}: {reason}``.

    A UserError passes unchanged.

    Args:
        problem: Description of the problem for the user.
        *kinds: The types of errors to convert; without any, every Exception. Parsers may raise any
            error on damaged files, even MemoryError if a header gives a wrong size.
    """
    converted = kinds or (Exception,)
    try:
        yield
    except UserError:
        raise
    except converted as error:
        raise UserError(f"{problem}: {shorten(reason_of(error), 400)}") from error


def describe_exit(code: int | None) -> str:
    """Return how a process ended: ``ended with code 3``, or ``was killed by SIGKILL`` for -9."""
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def interrupt_in(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the KeyboardInterrupt that an error is, or during which it was raised; else None.

    A library may fail as it cleans up after an interrupt, such as one in the middle of an import.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error


def plural(noun: str, number: float) -> str:
    """Return a noun, with an appended ``s`` unless ``number`` is 1."""
    return noun if number == 1 else f"{noun}s"


def with_noun(number: float, noun: str) -> str:
    """Return a number with its noun, such as ``1 step`` or ``2 steps``."""
    return f"{number} {plural(noun, number)}"


def printable(text: str) -> str:
    """Return the text for a terminal: unprintable characters escaped, passwords masked.

    Line breaks and tabs are kept. Escape sequences in the name of a received run would otherwise
    act on the terminal. Passwords are masked as in ``masked``.
    """
    if not (text.isascii() and text.isprintable()):
        text = "".join(map(_escaped, text))
    return masked(text)


def printable_line(text: str) -> str:
    """Return ``printable(text)`` on one line: line breaks escaped, tabs replaced by spaces."""
    return printable(text).replace("\n", "\\n").replace("\t", " ")


def _escaped(character: str) -> str:
    if character in "\n\t" or character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


_PASSWORD = re.compile(r"""(://[^/\s:@"'<>]*):[^/\s"'<>]+@""")


def masked(text: str) -> str:
    """Return the text with ``***`` in place of passwords in addresses (``http://user:***@host``)."""
    return _PASSWORD.sub(r"\1:***@", text) if "://" in text else text


def shorten(text: str, most: int = 200) -> str:
    """Return a text; if it has more than ``most`` characters, only beginning, end and length."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}...{text[-most // 4 :]} ({len(text)} characters)"


def join_some(items: list[str] | str, show: int = 5) -> str:
    """Join the first ``show`` items and the number of the others: ``a, b and 3 more``.

    A string is returned unchanged.
    """
    if isinstance(items, str):
        return items
    rest = len(items) - show
    return ", ".join(items[:show]) + (f" and {rest} more" if rest > 0 else "")


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Return rows of cells as lines with aligned columns, without trailing spaces.

    Args:
        rows: Rows of equal length.
        right: Indices of the columns that are aligned at their right side.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if column in right else "<" for column in range(len(widths))]
    lines = [
        [f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)]
        for row in rows
    ]
    return ["  ".join(line).rstrip() for line in lines]


def close_name(name: str, names: Iterable[str]) -> str | None:
    """Return the most similar of ``names``, ignoring case, or None if none is similar."""
    lower = {known.lower(): known for known in names}
    close = get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    return lower[close[0]] if close else None


def nearest(name: str, names: Iterable[str], *, show: int = 12) -> str:
    """Return a hint for a wrong name: ``did you mean 'moco'?``, or a list of valid names.

    Args:
        name: The wrong name.
        names: All valid names; without any, the hint is ``there are none``.
        show: Largest number of valid names to list if none is similar.
    """
    names = sorted(names)
    if close := close_name(name, names):
        return f"did you mean {close!r}?"
    listed = ", ".join(names[:show]) + (", ..." if len(names) > show else "")
    return f"known: {listed}" if names else "there are none"


def require(package: str, extra: str, purpose: str, key: str = "data") -> None:
    """Raise UserError with an install command if a package is missing; nothing is imported.

    Args:
        package: Name of the package.
        extra: Extra of selftask that installs it.
        purpose: Purpose of the package, in the plural, such as ``HDF5 files``.
        key: Config key or option that asks for it.
    """
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{key}: {purpose} need the package {package}: pip install {package}, or "
            f"pip install 'selftask[{extra}]'"
        )


def check_known(name: str, names: Iterable[str], problem: str) -> None:
    """Raise UserError with ``problem`` and the nearest name if ``name`` is not in ``names``."""
    if name not in names:
        raise UserError(f"{problem}; {nearest(name, names)}")


def close_path(path: str | Path) -> Path | None:
    """Return an existing path that is similar to a missing one, or None."""
    missing = _first_missing(path)
    # Names alone are compared, since a common folder makes any two paths similar.
    close = get_close_matches(missing.name, _names_beside(missing), n=1, cutoff=0.7)
    return missing.parent / close[0] if close else None


def nearest_path(path: str | Path) -> str:
    """Return a hint for a missing path: a similar path, existing ones beside it, or the first
    missing folder above it.
    """
    if close := close_path(path):
        return f"did you mean {str(close)!r}?"
    missing = _first_missing(path)
    if missing != Path(path) or missing.parent == Path("/"):  # its neighbors would say nothing
        return f"{missing} does not exist"
    beside = _names_beside(missing)
    listed = ", ".join(str(missing.parent / name) for name in beside[:6])
    return f"known: {listed}{', ...' * bool(beside[6:])}" if beside else "there are none"


def _first_missing(path: str | Path) -> Path:
    """Return a missing path, or the first missing folder above it."""
    missing = Path(path)
    while not os.path.isdir(missing.parent):
        missing = missing.parent
    return missing


def _names_beside(path: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(path.parent) if not name.startswith("."))
    except OSError:  # a hint must not raise
        return []
