"""File patterns: ``**`` and ``*`` as in a shell, braces ``{a,b}`` and ``{000..010}``."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

from selftask.errors import UserError, nearest
from selftask.files.paths import is_folder, names_in

MAX_EXPANDED = 10_000_000  # maximum length of a range in braces
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
MAGIC = re.compile(r"[*?\[]")


def is_pattern(text: str) -> bool:
    """Return whether a text has wildcards or braces to expand."""
    return bool(MAGIC.search(text)) or any(_is_choice(m[1]) for m in _BRACES.finditer(text))


def fixed_folder(pattern: str) -> str:
    """Return the deepest folder above all possible matches."""
    fixed = re.split(r"[*?\[{]", pattern, maxsplit=1)[0]
    return os.path.dirname(fixed) or "."


def match_files(pattern: str) -> list[str]:
    """Return the files that match a pattern, sorted.

    Braces are expanded first. A path without wildcards is returned even if there is no such file.
    """
    matches: set[str] = set()
    for expanded in expand_braces(pattern):
        if MAGIC.search(expanded):
            matches.update(
                path for path in glob.iglob(expanded, recursive=True) if not os.path.isdir(path)
            )
        else:
            matches.add(expanded)
    return sorted(matches)


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
        UserError: If a range decreases, or has more than MAX_EXPANDED numbers.
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
