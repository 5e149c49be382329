"""Recipes and their bases: the ``defaults:`` list of each file, in the order of Hydra.

A recipe names its bases in ``defaults:``. They are merged in the order of the list, each after its
own bases, and the file itself at ``_self_`` or, without it, at the end. Keys of each file are
global; an entry has no group or package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from selftask.config.compose import recipes
from selftask.config.compose.provenance import Layers, show_path
from selftask.config.compose.recipe_files import SELF, RecipeFile, read_recipe
from selftask.errors import ConfigError, UserError, nearest
from selftask.files.addresses import fetch, is_remote
from selftask.files.paths import expand_user


def compose_recipe(path: Path, *, may_fetch: bool = True) -> tuple[DictConfig, Layers]:
    """Return the merged config of a recipe file and its layers.

    Args:
        path: File of the recipe.
        may_fetch: Whether bases may be downloaded.

    Raises:
        ConfigError: If a file is not valid yaml or a defaults list is wrong.
    """
    bases = Bases(path.resolve().parent, may_fetch=may_fetch)
    layers = Layers(file.layer for file in bases.in_order(path.resolve()))
    merged = OmegaConf.create()
    for layer in layers:  # without resolving references
        merged.merge_with(layer.values)
    return merged, layers


@dataclass
class Bases:
    """Finds the bases of one recipe, which are given by name, path or address."""

    folder: Path
    """Folder of the recipe."""
    may_fetch: bool
    """Whether bases may be downloaded."""
    addresses: dict[Path, str] = field(default_factory=dict)
    """Downloaded file -> its address."""

    def in_order(self, path: Path, inheriting: tuple[Path, ...] = ()) -> Iterator[RecipeFile]:
        """Yield the bases of a file and the file itself, in the order in which they are merged.

        Args:
            path: The file.
            inheriting: Files that are being read and inherit it.
        """
        file = read_recipe(path, self._show(path))
        if path in inheriting:
            raise ConfigError([f"{file.defaults_place}: recipes that inherit each other"])
        for entry in file.defaults:
            if entry == SELF:
                yield file
            else:
                yield from self.in_order(self._find(entry, path, file), (*inheriting, path))

    def _show(self, path: Path) -> str:
        """Return the address of a downloaded file, or the path of any other file."""
        return self.addresses.get(path) or show_path(path)

    def _find(self, entry: str, path: Path, file: RecipeFile) -> Path:
        """Return the file of an entry of ``defaults:``.

        Args:
            entry: A name or path relative to the file, the name of a shipped or installed recipe
                (``/base/digits``), an absolute path with its extension, ``~/...`` or an address.
            path: The file that contains the entry.
            file: Its content.
        """
        try:
            address = self._address(entry, path)
            base = self._local(entry, path.parent) if address is None else self._fetch(address)
        except UserError as error:
            raise ConfigError([f"{file.defaults_place}: {error}"]) from error
        if base is not None:
            return base.resolve()
        name = entry.removeprefix("/")
        hint = nearest(name, [name for name, _ in recipes.recipe_files(recipes.folder())])
        raise ConfigError([f"{file.defaults_place}: there is no recipe {name!r}; {hint}"])

    def _local(self, entry: str, folder: Path) -> Path | None:
        if entry.startswith("~"):
            base = recipes.find_recipe(expand_user(entry))
            if base is None:
                raise UserError(f"there is no file {entry}")
            return base
        if entry.startswith("/") and recipes.is_recipe_file(entry):
            return recipes.find_recipe(Path(entry))
        name = entry.removeprefix("/")
        folders = [self.folder, recipes.folder()]
        if name == entry:
            folders.insert(0, folder)
        files = (recipes.find_recipe(folder / name) for folder in folders)
        return next(filter(None, files), None) or _installed(name)

    def _address(self, entry: str, path: Path) -> str | None:
        """Return the address of an entry, also if it is relative to a downloaded file; or None."""
        if is_remote(entry):
            return entry
        if path not in self.addresses or entry.startswith(("/", "~")):
            return None
        folder = self.addresses[path].rpartition("/")[0]
        return f"{folder}/{entry}" if recipes.is_recipe_file(entry) else f"{folder}/{entry}.yaml"

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
    recipe = recipes.available().get(name)
    return None if recipe is None else recipe.path
