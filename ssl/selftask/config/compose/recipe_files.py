"""Read a recipe file: its values with their lines, and the names of its bases.

The keys of each file are global, and short forms are expanded when the file is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from selftask.config.compose.foreign_recipes import foreign_framework
from selftask.config.compose.provenance import Layer
from selftask.config.compose.short_forms import expand
from selftask.config.keys import Key, is_path
from selftask.config.schema import Config
from selftask.errors import ConfigError, UserError
from selftask.files.received import read_bytes
from selftask.files.yaml_file import check_size

SELF = "_self_"  # entry of `defaults:` that stands for the file itself
TOP_KEYS = frozenset({*Config.__dataclass_fields__, "defaults", "import", "image_size"})


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
