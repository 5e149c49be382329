"""Difference between two configs, as a recipe that inherits one and gives the other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from operator import eq
from typing import Any

from selftask.config.compose.recipes import available, locate
from selftask.config.explain import COLUMN, are_sections, as_yaml
from selftask.config.keys import NAMED_ENTRIES, Key
from selftask.config.schema import Config
from selftask.config.schema.config import SHARED
from selftask.errors import shorten

_NAMES_OF_THE_RUN = ("recipe", "out")  # follow from the name of a recipe
_ABSENT = object()


def difference(config: Config, base: Config, recipe: str) -> str:
    """Return the yaml of a recipe that inherits ``recipe`` and results in ``config``.

    A comment after each value shows the value that it replaces. The keys ``recipe`` and ``out`` are
    omitted.

    Args:
        config: The config to describe.
        base: The config of ``recipe``.
        recipe: Name or path of the base recipe.
    """
    values, replaced = config.to_dict(), base.to_dict()
    for name in _NAMES_OF_THE_RUN:
        del values[name], replaced[name]
    lines = [f"defaults: [{_entry(recipe, base)}, _self_]"]
    around: Key = ()
    for key, value, before in _changes(values, replaced, ()):
        shared = len(list(takewhile(bool, map(eq, around, key[:-1]))))
        lines += [f"{'  ' * n}{as_yaml(key[n])}:" for n in range(shared, len(key) - 1)]
        lines += ("  " * (len(key) - 1) + line for line in _lines(key[-1], value, before))
        around = key[:-1]
    return "\n".join(lines)


def _lines(name: str, value: Any, before: Any) -> Iterator[str]:
    """Yield ``name: value  # old value``, or a line per component for a list of components."""
    if not are_sections(value):
        yield _commented(f"{as_yaml(name)}: {as_yaml(value)}", before)
        return
    old = before if isinstance(before, list) else []
    yield _commented(f"{as_yaml(name)}:", f"{len(old)} entries")
    for index, item in enumerate(value):
        replaced = old[index] if index < len(old) else _ABSENT
        if isinstance(replaced, dict) and replaced.get("name") == item.get("name"):
            replaced = {key: v for key, v in replaced.items() if item.get(key, _ABSENT) != v}
        text = f"  - {as_yaml(item)}"
        yield text if replaced == {} else _commented(text, replaced)


def _commented(text: str, before: Any) -> str:
    comment = "not set" if before is _ABSENT else shorten(as_yaml(before))
    return f"{text:<{COLUMN - 2}}  # {comment}"


def _entry(recipe: str, base: Config) -> str:
    """Return the entry of ``defaults:`` for a recipe: its name, or the absolute path of a file."""
    path = locate(recipe, base.data.source.name)
    names = [name for name, shipped in available().items() if shipped.path == path]
    return f"/{names[0]}" if names else str(path)


def _changes(
    values: dict[str, Any], base: dict[str, Any], key: Key
) -> Iterator[tuple[Key, Any, Any]]:
    """Yield key, value, and value in the base (or ``_ABSENT``) of each difference.

    Sections are compared key by key, lists as a whole. If the name of a component differs, all its
    own values are yielded, since its defaults differ. An entry that only the base has becomes None.
    """
    renamed = values.get("name") != base.get("name")
    for name, value in values.items():
        before, inner = base.get(name, _ABSENT), (*key, name)
        is_new = before is None or before is _ABSENT
        if isinstance(value, dict) and (isinstance(before, dict) or (value and is_new)):
            yield from _changes(value, {} if is_new else before, inner)
        elif value != before or (renamed and name not in SHARED.get(key, ())):
            yield inner, value, before
    if key in NAMED_ENTRIES or key == ("views",):
        for name in (name for name in base if name not in values):
            yield (*key, name), None, base[name]
