"""Extensions of recipe files. JSON is read as YAML, of which it is a subset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from selftask.files.paths import is_file

ENDINGS = (".yaml", ".yml", ".json")


def is_recipe_file(name: str | Path) -> bool:
    """Return whether a name has the extension of a recipe file."""
    return str(name).endswith(ENDINGS)


def find_recipe(path: Path) -> Path | None:
    """Return the recipe file at a path, whose extension may be missing, or None."""
    candidates = [path.with_name(path.name + ending) for ending in ENDINGS]
    return next(filter(is_file, [*candidates, path]), None)


def recipe_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield name (``simclr/digits``) and file of all recipes below a folder, sorted."""
    for path in sorted(folder.rglob("*")):
        if is_recipe_file(path):
            yield path.relative_to(folder).with_suffix("").as_posix(), path
