"""Image files that match a pattern."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass

from selftask.data.reading.patterns import MAGIC, fixed_folder, match_files
from selftask.data.reading.skipped_files import EXTENSIONS, describe, kind_of
from selftask.data.sources.files import LabeledByFolder
from selftask.errors import UserError
from selftask.files.paths import is_folder
from selftask.registry import register_source


@register_source("glob")
class Glob(LabeledByFolder):
    """Image files that match a pattern; folders at its first wildcard are labels, if several."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        pattern: str
        """Pattern such as ``/data/**/*.jpg``; ``**`` matches folders at any depth."""
        labels: bool = True
        """Whether folders at the first wildcard are used as labels, if there are several."""

    def __init__(self, config: Config) -> None:
        pattern = os.path.expanduser(config.pattern)
        self.root = fixed_folder(pattern)
        if not is_folder(self.root):
            raise UserError(f"data.pattern: {config.pattern}: there is no folder {self.root}")
        matches = match_files(pattern)
        images = _images(pattern, matches)
        relative = [os.path.relpath(path, self.root) for path in images]
        self._passed_over = Counter(filter(None, map(kind_of, set(matches).difference(images))))
        if not relative:
            others = f"; {describe(self._passed_over)}" if self._passed_over else ""
            raise UserError(f"data.pattern: no image matches {config.pattern}{others}")
        self._take_names(relative, labels=config.labels)


def _images(pattern: str, matches: list[str]) -> list[str]:
    """Return the images among the matches; all files if the pattern names an extension."""
    names_extension = not MAGIC.search(os.path.splitext(pattern)[1] or "*")
    if names_extension:
        return [path for path in matches if not os.path.isdir(path)]
    return [path for path in matches if path.lower().endswith(EXTENSIONS)]
