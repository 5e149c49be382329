"""Where a user's own code is and whether it takes the arguments it is called with, for messages."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selftask.config.compose.provenance import show_path
from selftask.errors import UserError


def explain_failure(error: Exception) -> str:
    """Format an error as ``failed at mine.py:7: KeyError: 'x'``.

    The line is that of a syntax error, or else the last one of the traceback in the user's own
    code. It is left out if there is none.
    """
    reason = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        where = f" at {show_path(Path(error.filename))}:{error.lineno}" if error.filename else ""
        return f"failed{where}: {type(error).__name__}: {error.msg}"
    frames = user_frames(error)
    where = f" at {place_of(frames[-1])}" if frames else ""
    return f"failed{where}: {type(error).__name__}: {reason}"


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the traceback entries in the user's own code, not in selftask or a library."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if is_users(frame.filename)]


def is_users(filename: str) -> bool:
    """Return whether a file in a traceback is the user's own code, not selftask or a library."""
    ours, standard = Path(__file__).resolve().parents[2], Path(traceback.__file__).parent
    others = (str(ours), str(standard), "site-packages", "dist-packages", "<")
    return not any(part in filename for part in others)


def place_of(frame: traceback.FrameSummary) -> str:
    """Return file and line of a traceback entry: ``mine.py:7``."""
    return f"{show_path(Path(frame.filename))}:{frame.lineno}"


def calling_place() -> str:
    """Return the innermost running line of the user's own code, as ``mine.py:7``.

    Without any, as in a command, return ``run``.
    """
    frames = [frame for frame in traceback.extract_stack() if is_users(frame.filename)]
    return place_of(frames[-1]) if frames else "run"


@contextmanager
def module_initialized(call: str) -> Iterator[None]:
    """Context that explains torch's error about an assignment before ``Module.__init__``.

    Args:
        call: The call that must come first.

    Raises:
        UserError: In place of this error, if the traceback has a line of the user's own code.
    """
    try:
        yield
    except AttributeError as error:
        frames = user_frames(error)
        if "before Module.__init__() call" not in str(error) or not frames:
            raise
        raise UserError(f"{place_of(frames[-1])}: call {call} first: {error}") from error


def source_of(entry: Any) -> str:
    """Return where a function or class is defined, such as ``mine.py:7``, or else its name.

    For any other object, its class is used.
    """
    entry = inspect.unwrap(getattr(entry, "__func__", entry))
    if not (inspect.isfunction(entry) or inspect.isclass(entry)):
        entry = type(entry)
    try:
        file, (_, line) = inspect.getsourcefile(entry), inspect.getsourcelines(entry)
    except (OSError, TypeError):  # made in a shell, or of C code
        file = None
    return f"{show_path(Path(file))}:{line}" if file else str(entry.__qualname__)


def check_takes(function: Callable[..., Any], arguments: Sequence[str], subject: str) -> None:
    """Raise UserError if a user's function cannot be called with these positional arguments.

    Args:
        function: The function or method.
        arguments: Names of the arguments, for the message.
        subject: What the function is, for the message.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C code, which has no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        raise UserError(
            f"{source_of(function)}: {subject} is called with ({', '.join(arguments)}), and takes "
            f"{signature}"
        ) from None


def construct(kind: Callable[..., Any], args: Mapping[str, Any], subject: str) -> Any:
    """Return ``kind(**args)``.

    Args:
        kind: A registered class.
        args: Its arguments in the config; empty for a class that is no dataclass.
        subject: Key and value, such as ``train.step=mine``.

    Raises:
        UserError: If the class is no dataclass, and requires arguments.
    """
    if not args:
        check_takes(kind, [], f"{subject}, which is no dataclass,")
    return kind(**args)
