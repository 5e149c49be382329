"""Completions of paths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_MANY = 2000  # largest number of names read from a folder; data sets have millions


def path_candidates(text: str, endings: tuple[str, ...] = ()) -> list[str]:
    """Return folders (with a slash), and files with these endings, that begin with ``text``."""
    paths = []
    for shown, entry in _entries(text):
        if entry.is_dir():
            paths.append(f"{shown}/")
        elif entry.name.endswith(endings):
            paths.append(shown)
    return sorted(paths)


def run_candidates(text: str) -> list[str]:
    """Return run folders, and other folders (with a slash), that begin with ``text``."""
    paths = []
    for shown, entry in _entries(text):
        if (Path(entry.path) / "config.yaml").is_file():
            paths.append(shown)
        elif entry.is_dir():
            paths.append(f"{shown}/")
    return sorted(paths)


def _entries(text: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield path and entry of each name that begins with ``text``, except hidden ones."""
    folder, slash, start = text.rpartition("/")
    where = os.path.expanduser(f"{folder}{slash}") or "."
    try:
        with os.scandir(where) as entries:
            for _, entry in zip(range(_MANY), entries, strict=False):
                if entry.name.startswith(start) and not entry.name.startswith("."):
                    yield f"{folder}{slash}{entry.name}", entry
    except OSError:  # the folder is missing or not readable
        return
