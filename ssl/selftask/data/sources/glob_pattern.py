"""File patterns: ``**`` and ``*`` as in a shell, braces ``{a,b}`` and ``{000..010}``."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from selftask.data.labels import label_top_folders, name_top_folders
from selftask.data.reading.skipped_files import describe, kind_of
from selftask.data.source import PathTable
from selftask.data.sources.files import EXTENSIONS, FileSource
from selftask.errors import UserError, nearest
from selftask.files.paths import is_folder, names_in
from selftask.registry import register_source

MAX_EXPANDED = 10_000_000  # most names of one range in braces
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAGIC = re.compile(r"[*?\[]")


@register_source("glob")
class Glob(FileSource):
    """Image files that match a pattern; folders at its first wildcard are used as labels."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        pattern: str
        """Pattern such as ``/data/**/*.jpg``; ``**`` matches folders at any depth."""
        labels: bool = True
        """Whether folders at the first wildcard are used as labels."""

    def __init__(self, config: Config) -> None:
        pattern = os.path.expanduser(config.pattern)
        self.root = fixed_folder(pattern)
        if not is_folder(self.root):
            raise UserError(f"data.pattern: {config.pattern}: there is no folder {self.root}")
        matches = match_files(pattern)
        images = _images(pattern, matches)
        found = [os.path.relpath(path, self.root) for path in images]
        self._passed_over = Counter(filter(None, map(kind_of, set(matches).difference(images))))
        if not found:
            others = f"; {describe(self._passed_over)}" if self._passed_over else ""
            raise UserError(f"data.pattern: no image matches {config.pattern}{others}")
        self.paths = PathTable(found)
        self.num_folders = len({os.path.dirname(path) for path in found})
        self.labels = label_top_folders(found) if config.labels else None

    def class_names(self) -> list[str] | None:
        """Return the names of the folders that are used as labels."""
        return name_top_folders(self.paths, self.labels)


def is_pattern(text: str) -> bool:
    """Return whether a text has wildcards or braces to expand."""
    return bool(_MAGIC.search(text)) or any(_is_choice(m[1]) for m in _BRACES.finditer(text))


def fixed_folder(pattern: str) -> str:
    """Return the deepest folder above all possible matches."""
    fixed = re.split(r"[*?\[{]", pattern, maxsplit=1)[0]
    return os.path.dirname(fixed) or "."


def match_files(pattern: str) -> list[str]:
    """Return matching files, sorted. Names from braces without wildcards need not exist."""
    found: set[str] = set()
    for expanded in expand_braces(pattern):
        if _MAGIC.search(expanded):
            found.update(path for path in glob.iglob(expanded, recursive=True) if _is_file(path))
        else:
            found.add(expanded)
    return sorted(found)


def no_match(pattern: str) -> str:
    """Return an error message for a pattern without a match, with similar existing paths."""
    folder = Path(fixed_folder(pattern))
    while not is_folder(folder):
        folder = folder.parent
    names = [str(folder / name) for name in names_in(folder)]
    return f"no file matches {pattern}; in {folder}: {nearest(pattern, names, show=6)}"


def expand_braces(text: str) -> Iterator[str]:
    """Expand ``{a,b}`` and ``{000..010}`` in order; other braces are kept.

    The numbers of a range are zero-padded to the width of the first one, as for WebDataset shards.

    Raises:
        UserError: A range decreases, or has more than MAX_EXPANDED numbers.
    """
    for match in _BRACES.finditer(text):
        if _is_choice(match[1]):
            for option in _options(match[1], text):
                for rest in expand_braces(text[match.end() :]):
                    yield f"{text[: match.start()]}{option}{rest}"
            return
    yield text


def _is_choice(inside: str) -> bool:
    return "," in inside or bool(_RANGE.fullmatch(inside))


def _options(inside: str, text: str) -> list[str]:
    span = _RANGE.fullmatch(inside)
    if span is None:
        return inside.split(",")
    first, last = int(span[1]), int(span[2])
    if not 0 <= last - first < MAX_EXPANDED:
        raise UserError(
            f"data: {{{inside}}} in {text} is not a range: the smaller number comes first, and "
            f"there are at most {MAX_EXPANDED}"
        )
    return [str(number).zfill(len(span[1])) for number in range(first, last + 1)]


def _images(pattern: str, matches: list[str]) -> list[str]:
    """Return the images among the matches; all files if the pattern has an extension."""
    names_extension = not _MAGIC.search(os.path.splitext(pattern)[1] or "*")
    if names_extension:
        return [path for path in matches if _is_file(path)]
    return [path for path in matches if path.lower().endswith(EXTENSIONS)]


def _is_file(path: str) -> bool:
    return not os.path.isdir(path)
