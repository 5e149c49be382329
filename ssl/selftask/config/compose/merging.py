"""Read, merge and set values of a config before its references are resolved.

Values are plain dicts and lists: with OmegaConf's containers, loading a config takes almost twice
as long.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from selftask.config.keys import Key, dotted

_REFERENCE = re.compile(r"\$\{(\.*)([^${}:.][^${}:]*)\}")  # without a resolver such as oc.env


def value_at(value: Any, key: Key) -> tuple[bool, Any]:
    """Return whether there is a value at ``key``, and the value."""
    for name in key:
        if isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            return False, None
    return True, value


def merge(
    base: dict[str, Any],
    values: Mapping[str, Any],
    key: Key = (),
    root: dict[str, Any] | None = None,
) -> Iterator[Key]:
    """Merge a section into ``base``, in place; lists are replaced.

    A section that is merged over a reference to another one changes a copy of that one.

    Args:
        base: The section to change.
        values: The section with other values.
        key: Key of both.
        root: The whole config, which references name; if None, ``base``.

    Yields:
        Each key that is a list in one and a section in the other, where ``base`` stays as it is.
    """
    root = base if root is None else root
    for name, value in values.items():
        inner, before = (*key, name), base.get(name)
        if {type(before), type(value)} == {dict, list}:
            yield inner
        elif isinstance(value, dict):
            section = base[name] = _section(root, inner, before)
            yield from merge(section, value, inner, root)
        else:
            base[name] = copy.deepcopy(value) if isinstance(value, list) else value


def _section(root: dict[str, Any], key: Key, value: Any) -> dict[str, Any]:
    """Return the value at ``key`` if it is a section, a copy if it refers to one, or a new one."""
    if isinstance(value, dict):
        return value
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return {}
    dots, name = len(match[1]), match[2]  # one dot: beside the reference; none: from the root
    around = key[: max(0, len(key) - dots)] if dots else ()
    referred = value_at(root, (*around, *name.split(".")))[1]
    return copy.deepcopy(referred) if isinstance(referred, dict) else {}


def set_value(values: dict[str, Any], key: Key, value: Any, *, merges: bool = True) -> None:
    """Set the value at ``key`` in place; missing sections are made.

    Args:
        values: The values.
        key: Key of the value; its parts may be indices of lists.
        value: The value.
        merges: Whether a section is merged into the one that is there, or replaces it.

    Raises:
        ValueError: If the key has a name instead of an index, or a section would replace a list or
            a list a section.
        IndexError: If a list has fewer items.
    """
    parent: Any = values
    for depth, name in enumerate(key[:-1], start=1):
        index = _index(parent, name)
        inner = parent[index] if isinstance(parent, list) else parent.get(index)
        if not isinstance(inner, dict | list):
            inner = parent[index] = _section(values, key[:depth], inner)
        parent = inner
    index = _index(parent, key[-1])
    before = parent[index] if isinstance(parent, list) else parent.get(index)
    if not merges:
        parent[index] = value
        return
    holder = {key[-1]: before}
    for mixed in merge(holder, {key[-1]: value}, key[:-1], values):
        raise ValueError(f"{dotted(mixed)}: a list cannot be merged with a section")
    parent[index] = holder[key[-1]]


def _index(parent: dict[str, Any] | list[Any], name: str) -> Any:
    """Return the index of an item of a list, or the name."""
    if not isinstance(parent, list):
        return name
    if not name.isdigit():
        raise ValueError(f"items of a list are numbered from 0, and {name!r} is no number")
    return int(name)
