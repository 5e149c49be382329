"""Read a recipe and its bases: the ``defaults:`` list of each file, in the order of Hydra.

A recipe names its bases in ``defaults:``. They are merged in the order of the list, each after its
own bases, and the file itself at ``_self_`` or, without it, at the end. Keys of each file are
global; an entry has no group or package. Short forms are expanded when a file is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader

from selftask.config.compose import recipes
from selftask.config.compose.foreign_recipes import foreign_framework
from selftask.config.compose.provenance import Layer, Layers, show_path
from selftask.config.compose.short_forms import expand
from selftask.config.keys import Key, is_path
from selftask.config.schema import Config
from selftask.errors import ConfigError, UserError, nearest
from selftask.files.addresses import fetch, is_remote
from selftask.files.paths import expand_user
from selftask.files.received import read_bytes
from selftask.files.yaml_file import check_size

SELF = "_self_"  # entry of `defaults:` that stands for the file itself
TOP_KEYS = frozenset({*Config.__dataclass_fields__, "defaults", "import", "image_size"})


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


@dataclass(frozen=True)
class RecipeFile:
    """Content of a recipe file."""

    defaults: list[str]
    """Entries of ``defaults:``, of which exactly one is ``_self_``."""
    defaults_place: str
    """Origin of ``defaults:`` for messages."""
    layer: Layer
    """The other values."""


def read_recipe(path: Path, shown: str) -> RecipeFile:
    """Read a recipe file.

    Args:
        path: The file.
        shown: Its path or address in messages.

    Raises:
        ConfigError: If the file is not valid yaml, or not a recipe.
    """
    values, node = _load_yaml(path, shown)
    values = {} if values is None else _take_path_texts(values, node)
    if not isinstance(values, dict):
        raise ConfigError([f"{shown}:1: a recipe is `key: value` lines; this is not"])
    if message := foreign_framework(values, TOP_KEYS):
        raise ConfigError([f"{shown}: {message}"])
    marks = _read_marks(node, shown)
    if "hydra" in values:
        line = marks[("hydra",)]
        raise ConfigError([f"{line}: unknown key 'hydra': recipes have no settings of Hydra"])
    place = f"{marks.get(('defaults',), shown)}: defaults"
    defaults = _check_defaults(values.pop("defaults", []), place)
    try:
        return RecipeFile(defaults, place, Layer(expand(_texts(values)), marks))
    except UserError as error:  # from the catalog, or an inaccessible path
        raise ConfigError([f"{shown}: {error}"]) from error


def _load_yaml(path: Path, shown: str) -> tuple[Any, yaml.Node | None]:
    """Return the values of a file and its syntax tree; raise ConfigError for invalid yaml."""
    try:
        text = read_bytes(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{shown}: cannot be read: {error}"]) from error
    if path.suffix == ".json":
        text = text.replace("\t", " ")  # JSON has tabs between tokens only; yaml allows none there
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        check_size(node)
        return yaml.load(text, Loader=get_yaml_loader()), node
    except yaml.YAMLError as error:
        raise ConfigError([_explain_yaml(error, shown)]) from error
    except (ValueError, RecursionError) as error:  # such as 5,000 digits or 1,000 brackets
        reason = str(error).partition(";")[0]
        raise ConfigError([f"{shown}: cannot be read as yaml: {reason}"]) from error


def _read_marks(node: yaml.Node | None, shown: str) -> dict[Key, str]:
    """Return ``file:line`` for every key of a yaml document, with ``shown`` as the file."""
    marks: dict[Key, str] = {}

    def visit(node: yaml.Node, key: Key) -> None:
        if isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                inner = (*key, str(name.value))
                marks[inner] = f"{shown}:{name.start_mark.line + 1}"
                visit(value, inner)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                inner = (*key, str(index))
                marks[inner] = f"{shown}:{value.start_mark.line + 1}"
                visit(value, inner)

    if node is not None:
        visit(node, ())
    return marks


def _take_path_texts(values: Any, node: yaml.Node | None, key: Key = ()) -> Any:
    """Return the values with paths as written text: the folder ``1e3`` is not 1000."""
    if isinstance(values, dict) and isinstance(node, yaml.MappingNode):
        inner = {str(name.value): value for name, value in node.value}
        return {
            name: _take_path_texts(value, inner.get(str(name)), (*key, str(name)))
            for name, value in values.items()
        }
    if isinstance(values, int | float) and isinstance(node, yaml.ScalarNode) and is_path(key):
        return node.value
    return values


def _check_defaults(entries: Any, place: str) -> list[str]:
    """Return the entries of ``defaults:``, with ``_self_``; raise ConfigError if one is invalid."""
    if not isinstance(entries, list) or not all(map(_is_recipe_name, entries)):
        expected = "a list of recipe names, as in [/base/digits, _self_]"
        raise ConfigError([f"{place}: {entries!r}: expected {expected}"])
    if entries.count(SELF) > 1:
        raise ConfigError([f"{place}: {SELF} is listed twice"])
    return entries if SELF in entries else [*entries, SELF]


def _is_recipe_name(entry: Any) -> bool:
    """Return whether an entry is a plain name without Hydra's group and package syntax."""
    return isinstance(entry, str) and not re.search(r"[@\s$]", entry)


def _texts(value: Any) -> Any:
    """Convert keys to strings, as on the command line; yaml reads ``5:`` as a number."""
    if isinstance(value, dict):
        return {str(key): _texts(item) for key, item in value.items()}
    return [_texts(item) for item in value] if isinstance(value, list) else value


def _explain_yaml(error: yaml.YAMLError, shown: str) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f"{shown}:{mark.line + 1}" if mark else shown
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    if "'\\t'" in problem:
        problem = "a tab where yaml wants spaces"
    context = getattr(error, "context", None)
    return f"{place}: not valid yaml: {problem}" + (f" ({context})" if context else "")
