"""Read the last lines of files that a run appends to, without reading the whole file."""

from __future__ import annotations

from pathlib import Path

from selftask.files.received import open_regular

TAIL = 1 << 16  # number of bytes read from the end of a file


def last_lines(path: Path, size: int = TAIL) -> list[str]:
    """Return the lines in the last bytes of a file, or an empty list for a missing file.

    An incomplete first line is dropped; the last line may be incomplete. White space at both ends
    is removed.

    Args:
        path: The file.
        size: Number of bytes to read.

    Raises:
        OSError: If the file cannot be read or is not a regular file.
    """
    try:
        with open_regular(path) as file:
            start = max(0, file.seek(0, 2) - size)
            file.seek(max(0, start - 1))
            data = file.read()
    except FileNotFoundError:
        return []
    if start:
        data = data.partition(b"\n")[2]
    return data.decode("utf-8", errors="replace").strip().splitlines()


def last_line(path: Path) -> str:
    """Return the last line that is not blank, or an empty string; see ``last_lines``."""
    return (last_lines(path) or [""])[-1]
