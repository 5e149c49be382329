"""Find a recipe by the name of a method, by its own name, or by its file.

An installed package with an entry point of the group ``selftask`` may provide recipes in a folder
``configs``: its ``configs/mine/digits.yaml`` is the recipe ``mine/digits``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import selftask
from selftask.config.extensions.imports import GROUP
from selftask.errors import ConfigError, UserError, nearest
from selftask.files.addresses import fetch, is_remote
from selftask.files.paths import expand_user, is_file
from selftask.registry import METHODS

ENDINGS = (".yaml", ".yml", ".json")  # JSON is read as YAML, of which it is a subset
DEFAULT_SOURCE = "digits"  # data set for a bare method name; ships with scikit-learn


@dataclass(frozen=True)
class Recipe:
    """A shipped or installed recipe."""

    name: str  # simclr/resnet18_cifar10
    path: Path

    @property
    def header(self) -> list[str]:
        """Leading comment lines of the file: paper, accuracy, hardware, command."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        length = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
        return [line.lstrip("#").strip() for line in lines[:length]]


@cache
def folder() -> Path:
    """Return the folder of shipped recipes: ``configs/`` in a checkout or in the package.

    Raises:
        ConfigError: If there is none.
    """
    package = Path(selftask.__file__).resolve().parent
    for candidate in (package.parents[1] / "configs", package / "configs"):
        if candidate.is_dir():
            return candidate
    raise ConfigError([f"the shipped recipes are missing: no configs/ beside or in {package}"])


def shipped() -> dict[str, Recipe]:
    """Return all shipped recipes by name, except for the shared parts in ``base/``."""
    return _recipes_in(folder())


def available() -> dict[str, Recipe]:
    """Return the recipes of selftask and of installed packages by name.

    Raises:
        ConfigError: If two recipes have the same name.
    """
    by_name = dict(shipped())
    problems = []
    for folder in _installed_folders():
        for name, recipe in _recipes_in(folder).items():
            if name in by_name:
                other = by_name[name].path
                problems.append(f"{recipe.path}: the recipe {name!r} is taken: {other}")
            by_name[name] = recipe
    if problems:
        raise ConfigError(problems)
    return by_name


def _recipes_in(folder: Path) -> dict[str, Recipe]:
    by_name = {name: Recipe(name, path) for name, path in recipe_files(folder)}
    return {name: recipe for name, recipe in by_name.items() if not name.startswith("base/")}


def _installed_folders() -> list[Path]:
    """Return the ``configs`` folders of packages with an entry point, without importing them."""
    packages = _packages_on(tuple((path, _time_of_change(path)) for path in sys.path))
    specs = [importlib.util.find_spec(package) for package in packages]
    folders = [spec.submodule_search_locations or [] for spec in specs if spec is not None]
    candidates = [Path(path) / "configs" for paths in folders for path in paths]
    return [path for path in candidates if path.is_dir()]


@cache
def _packages_on(search_path: tuple[tuple[str, int], ...]) -> list[str]:
    """Return the packages with an entry point.

    Args:
        search_path: Folders of ``sys.path`` with their modification times. The result is cached
            until one of them changes.
    """
    points = importlib.metadata.entry_points(group=GROUP)
    return sorted({point.module.partition(".")[0] for point in points})


def _time_of_change(folder: str) -> int:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:  # the folder does not exist
        return 0


def locate(recipe: str, source: str | None) -> Path:
    """Return the file of a recipe.

    The name of a method means its ``digits`` recipe, or its ``images`` recipe if ``data=`` gives
    other data.

    Args:
        recipe: Name of a method or recipe, or path of a file.
        source: Name of the source that ``data=`` gives, or None.

    Raises:
        ConfigError: If there is no such recipe or file, with the nearest names.
    """
    names = available()
    path = expand_user(recipe)
    if is_recipe_file(recipe) or path.suffix == ".py":  # reading refuses Python, with a reason
        if is_file(path):
            return path.resolve()
        raise _unknown(recipe, "there is no such file")
    if recipe in names:
        return names[recipe].path
    variants = [name for name in names if name.startswith(f"{recipe}/")]
    if variants:
        chosen = f"{recipe}/{'digits' if source in (None, DEFAULT_SOURCE) else 'images'}"
        if chosen in names:
            return names[chosen].path
        raise _unknown(recipe, f"there is no recipe {chosen!r}; known: {', '.join(variants)}")
    if recipe in METHODS:
        lines = f"`defaults: [/base/{DEFAULT_SOURCE}]` and `method: {recipe}`"
        raise _unknown(recipe, f"the method has no recipe of its own; write a yaml with {lines}")
    if is_file(path / "config.yaml"):
        raise _unknown(recipe, f"a folder; did you mean '{path}/config.yaml'?")
    shown = names if "/" in recipe else {name.partition("/")[0] for name in names}
    raise _unknown(recipe, f"no method, recipe or yaml file of this name; {nearest(recipe, shown)}")


def _unknown(recipe: str, reason: str) -> ConfigError:
    return ConfigError([f"command line: {recipe}: {reason}"])


def is_recipe_file(name: str | Path) -> bool:
    """Return whether a name has the extension of a recipe file."""
    return str(name).endswith(ENDINGS)


def find_recipe(path: Path) -> Path | None:
    """Return the recipe file at a path, with or without its extension, or None."""
    candidates = [path.with_name(path.name + ending) for ending in ENDINGS]
    return next(filter(is_file, [*candidates, path]), None)


def recipe_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield name (``simclr/digits``) and file of all recipes below a folder, sorted."""
    start = os.path.join(folder, "")
    # Text, not Path: there are hundreds of recipes, listed for each config that is loaded.
    parts = [
        os.path.join(root, file).removeprefix(start).split(os.sep)
        for root, _, files in os.walk(folder)
        for file in files
        if is_recipe_file(file)
    ]
    for inner in sorted(parts):
        name = "/".join(inner)
        yield os.path.splitext(name)[0], Path(start + name)


@dataclass
class Bases:
    """Finds the bases of one recipe, which are given by name, path or address."""

    folder: Path
    """Folder of the recipe."""
    may_fetch: bool
    """Whether bases may be downloaded."""
    addresses: dict[Path, str] = field(default_factory=dict)
    """Downloaded file -> its address."""

    def find(self, entry: str, path: Path) -> Path:
        """Return the file of an entry of ``defaults:``.

        Args:
            entry: A name or path relative to the file or to the recipe's folder; the name of a
                shipped or installed recipe (``/base/digits``); an absolute path with its extension;
                ``~/...``; or an address.
            path: The file that contains the entry.

        Raises:
            UserError: If there is no such file, or it may not be downloaded.
        """
        address = self._address(entry, path)
        base = self._local(entry, path.parent) if address is None else self._fetch(address)
        if base is not None:
            return base.resolve()
        name = entry.removeprefix("/")
        hint = nearest(name, [name for name, _ in recipe_files(folder())])
        raise UserError(f"there is no recipe {name!r}; {hint}")

    def _local(self, entry: str, beside: Path) -> Path | None:
        if entry.startswith("~"):
            base = find_recipe(expand_user(entry))
            if base is None:
                raise UserError(f"there is no file {entry}")
            return base
        if entry.startswith("/") and is_recipe_file(entry):
            return find_recipe(Path(entry))
        name = entry.removeprefix("/")
        folders = [self.folder, folder()] if name != entry else [beside, self.folder, folder()]
        files = (find_recipe(folder / name) for folder in folders)
        return next(filter(None, files), None) or _installed(name)

    def _address(self, entry: str, path: Path) -> str | None:
        """Return the address of an entry, or None for a local one.

        An entry of a downloaded file is relative to its address, unless it begins with / or ~.
        """
        if is_remote(entry):
            return entry
        if path not in self.addresses or entry.startswith(("/", "~")):
            return None
        folder = self.addresses[path].rpartition("/")[0]
        return f"{folder}/{entry}" if is_recipe_file(entry) else f"{folder}/{entry}.yaml"

    def _fetch(self, address: str) -> Path:
        if not self.may_fetch:
            raise UserError(
                f"{address} would be fetched; if you trust where it comes from, add trust=true"
            )
        for path, fetched in self.addresses.items():
            if fetched == address:
                return path
        path = fetch(address).resolve()
        self.addresses[path] = address
        return path


def _installed(name: str) -> Path | None:
    """Return the file of an installed package's recipe, or None."""
    recipe = available().get(name)
    return None if recipe is None else recipe.path
