"""Path queries for paths given by users; system errors become UserError.

``Path.exists`` and similar methods raise for a folder that may not be entered, a name that is too
long or a null byte, or return False, depending on the version of Python. ``Path.expanduser``
raises for an unknown ``~name``.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from selftask.errors import UserError, shorten

_ABSENT = (errno.ENOENT, errno.ENOTDIR)
_OF_THE_SYSTEM = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}
    | {errno.ENAMETOOLONG, errno.ELOOP, errno.EMFILE, errno.ENFILE, errno.ENXIO, errno.ETXTBSY}
    | {errno.EFBIG, errno.EHOSTDOWN, errno.ETIMEDOUT}
)


def expand_user(path: str | Path) -> Path:
    """Return the path with ``~`` and ``~user`` replaced; an unknown ``~user`` is kept."""
    return Path(os.path.expanduser(path))


def exists(path: str | Path) -> bool:
    """Return True if a path exists. Raises UserError if this cannot be determined."""
    return _mode(path) != 0


def is_folder(path: str | Path) -> bool:
    """Return True if a path is a folder. Raises UserError if this cannot be determined."""
    return stat.S_ISDIR(_mode(path))


def is_file(path: str | Path) -> bool:
    """Return True if a path is a regular file. Raises UserError if this cannot be determined."""
    return stat.S_ISREG(_mode(path))


def names_in(folder: str | Path) -> list[str]:
    """Return the sorted names in a folder. Raises UserError if it cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise UserError(_reason(error, folder)) from error


def explain(error: OSError) -> str | None:
    """Return a one-line message for a system error, such as a full disk; None for other errors.

    The result is also None for a missing file, which the caller reports, and for an error without a
    file name, unless the disk or a quota is full.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:  # of a write
        return f"{_strerror(error)}: the output or a file could not be written"
    if error.errno not in _OF_THE_SYSTEM or not isinstance(error.filename, str | bytes | Path):
        return None
    return _reason(error, os.fsdecode(error.filename))


def _mode(path: str | Path) -> int:
    """Return the mode of a file, or 0 if there is none."""
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno in _ABSENT:
            return 0
        raise UserError(_reason(error, path)) from error
    except ValueError as error:
        raise UserError(f"{str(path)!r}: is no path ({error})") from error


def _reason(error: OSError, path: str | Path) -> str:
    reason = _strerror(error)
    closed = _closed_folder(Path(path)) if error.errno == errno.EACCES else None
    shown = shorten(str(path))
    if closed is None or closed == Path(path):
        return f"{shown}: {reason}"
    return f"{shown}: {reason}: you may not enter {closed}"


def _strerror(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _closed_folder(path: Path) -> Path | None:
    """Return the first folder on the path that may not be entered, or None."""
    above = [*reversed(path.absolute().parents)]
    return next((f for f in above if os.path.isdir(f) and not os.access(f, os.X_OK)), None)
