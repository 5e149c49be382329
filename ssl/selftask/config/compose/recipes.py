"""Finding a recipe: a method's name, a shipped recipe's, or a file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import selftask
from selftask.errors import ConfigError, nearest
from selftask.files.paths import expand_user, is_file
from selftask.registry import METHODS

DEFAULT_SOURCE = "digits"  # ships with scikit-learn: what a bare method name trains on


@dataclass(frozen=True)
class Recipe:
    """A shipped recipe."""

    name: str  # simclr/resnet18_cifar10
    path: Path

    @property
    def header(self) -> list[str]:
        """Its leading comment lines: paper, accuracy, hardware, command."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        length = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
        return [line.lstrip("#").strip() for line in lines[:length]]


@cache
def folder() -> Path:
    """Return the folder of shipped recipes: ``configs/`` of a checkout or of the package."""
    package = Path(selftask.__file__).resolve().parent
    for candidate in (package.parents[1] / "configs", package / "configs"):
        if candidate.is_dir():
            return candidate
    raise ConfigError([f"the shipped recipes are missing: no configs/ beside or in {package}"])


def shipped() -> dict[str, Recipe]:
    """Return all shipped recipes by name, without the shared parts in ``base/``."""
    paths = sorted(folder().rglob("*.yaml"))
    names = [path.relative_to(folder()).with_suffix("").as_posix() for path in paths]
    found = {name: Recipe(name, path) for name, path in zip(names, paths, strict=True)}
    return {name: recipe for name, recipe in found.items() if not name.startswith("base/")}


def locate(recipe: str, source: str | None) -> Path:
    """Return the file of a recipe.

    A bare method means its ``digits`` recipe, and its ``images`` recipe when ``data=`` names
    something else. Raises ConfigError with the nearest names.
    """
    known = shipped()
    path = expand_user(recipe)
    if recipe.endswith((".yaml", ".yml")):
        if is_file(path):
            return path.resolve()
        raise _unknown(recipe, "there is no such file")
    if recipe in known:
        return known[recipe].path
    own = [name for name in known if name.startswith(f"{recipe}/")]
    if own:
        chosen = f"{recipe}/{'digits' if source in (None, DEFAULT_SOURCE) else 'images'}"
        if chosen in known:
            return known[chosen].path
        raise _unknown(recipe, f"there is no recipe {chosen!r}; known: {', '.join(own)}")
    if recipe in METHODS:
        lines = f"`defaults: [/base/{DEFAULT_SOURCE}]` and `method: {recipe}`"
        raise _unknown(recipe, f"the method has no recipe of its own; write a yaml with {lines}")
    if is_file(path / "config.yaml"):
        raise _unknown(recipe, f"a folder; did you mean '{path}/config.yaml'?")
    names = known if "/" in recipe else {name.partition("/")[0] for name in known}
    raise _unknown(recipe, f"no method, recipe or yaml file of this name; {nearest(recipe, names)}")


def _unknown(recipe: str, reason: str) -> ConfigError:
    return ConfigError([f"command line: {recipe}: {reason}"])
