"""Completions of paths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_MANY = 2000  # largest number of names read from a folder; data sets have millions


def path_candidates(text: str, endings: tuple[str, ...] = ()) -> list[str]:
    """Return folders (with a slash), and files with these endings, whose path begins with ``text``.

    Without endings only folders are returned; the ending ``""`` allows all files.
    """
    return sorted(
        f"{shown}/" if entry.is_dir() else shown
        for shown, entry in _entries(text)
        if entry.is_dir() or entry.name.endswith(endings)
    )


def run_candidates(text: str) -> list[str]:
    """Return run folders, and other folders (with a slash), whose path begins with ``text``."""
    folders = [(shown, Path(entry.path)) for shown, entry in _entries(text) if entry.is_dir()]
    runs = {shown for shown, path in folders if (path / "config.yaml").is_file()}
    return sorted(shown if shown in runs else f"{shown}/" for shown, _ in folders)


def _entries(text: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield path and entry of each name that completes ``text``, except hidden ones.

    At most ``_MANY`` names of the folder are examined.
    """
    folder, slash, start = text.rpartition("/")
    where = os.path.expanduser(f"{folder}{slash}") or "."
    try:
        with os.scandir(where) as entries:
            for _, entry in zip(range(_MANY), entries, strict=False):
                if entry.name.startswith(start) and not entry.name.startswith("."):
                    yield f"{folder}{slash}{entry.name}", entry
    except OSError:  # the folder is missing or not readable
        return
