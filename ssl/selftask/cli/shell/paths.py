"""Paths that a word may become."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_MANY = 2000  # names of a folder that are looked at; the folders of data sets have millions


def path_candidates(text: str, endings: tuple[str, ...] = ()) -> list[str]:
    """Return the folders, with a slash, and files with these endings that begin with ``text``."""
    found = []
    for shown, entry in _entries(text):
        if entry.is_dir():
            found.append(f"{shown}/")
        elif entry.name.endswith(endings):
            found.append(shown)
    return sorted(found)


def run_candidates(text: str) -> list[str]:
    """Return the runs that begin with ``text``, and the folders on the way to others."""
    found = []
    for shown, entry in _entries(text):
        if (Path(entry.path) / "config.yaml").is_file():
            found.append(shown)
        elif entry.is_dir():
            found.append(f"{shown}/")
    return sorted(found)


def _entries(text: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield what begins with ``text`` as it would be written, hidden names left out."""
    folder, slash, start = text.rpartition("/")
    where = os.path.expanduser(f"{folder}{slash}") or "."
    try:
        with os.scandir(where) as entries:
            for _, entry in zip(range(_MANY), entries, strict=False):
                if entry.name.startswith(start) and not entry.name.startswith("."):
                    yield f"{folder}{slash}{entry.name}", entry
    except OSError:  # no such folder, or not allowed: nothing to offer
        return
