"""Origin of config values: the values of each file and of the command line, with their lines.

Merging loses the origin of a value, so the values before merging are kept as layers.
``Layers.place(key)`` returns ``configs/simclr/digits.yaml:7`` or
``command line: train.epochs=3``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from selftask.config.keys import Key, default_name, is_path, named_places


@dataclass
class Layer:
    """Values of one file or of the command line, and the origins of its keys."""

    values: dict[str, Any]
    marks: dict[Key, str] = field(default_factory=dict)

    def holds(self, key: Key) -> bool:
        """Return whether this layer sets ``key``."""
        return _walk(self.values, key)[0]

    def value(self, key: Key) -> Any:
        """Return the value of ``key`` in this layer, or None."""
        return _walk(self.values, key)[1]

    def replaces(self, key: Key) -> bool:
        """Return whether this layer holds a list or a plain value at or above ``key``.

        If so, merging ignored the value of earlier layers.
        """
        return any(
            found and not isinstance(value, dict)
            for found, value in (_walk(self.values, key[:n]) for n in range(1, len(key) + 1))
        )

    def place(self, key: Key) -> str | None:
        """Return the origin of ``key``, or else of the section that contains it."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.marks:
                return self.marks[key[:length]]
        return None

    def record(self, key: Key, value: Any, place: str) -> None:
        """Set ``key`` as an override does: sections are merged, other values replaced."""
        self.marks[key] = place
        if isinstance(value, dict) and value:
            for name, item in value.items():
                self.record((*key, name), item, place)
            return
        section = self.values
        for name in key[:-1]:
            inner = section.get(name)
            section[name] = section = inner if isinstance(inner, dict) else {}
        section[key[-1]] = value

    def drop(self, key: Key) -> None:
        """Remove ``key`` from this layer."""
        found, parent = _walk(self.values, key[:-1])
        if found and isinstance(parent, dict):
            parent.pop(key[-1], None)


class Layers(list[Layer]):
    """All layers, in which later ones override earlier ones."""

    def place(self, key: Key) -> str | None:
        """Return the origin of the value at ``key``, or None if no layer sets it."""
        for layer in reversed(self):
            if layer.holds(key):
                return layer.place(key)
            if layer.replaces(key):
                return None
        return None

    def place_or_around(self, key: Key) -> str | None:
        """Return the origin of ``key``, or else of a key inside it or of a section around it."""
        for length in range(len(key), 0, -1):
            place = self.place(key[:length]) or self._place_inside(key[:length])
            if place is not None:
                return place
        return None

    def _place_inside(self, key: Key) -> str | None:
        marks = [m for layer in reversed(self) for m in layer.marks.items()]
        return next((place for inner, place in marks if inner[: len(key)] == key), None)

    def forget_renamed(
        self, values: dict[str, Any], fixed: Mapping[Key, Iterable[str]]
    ) -> dict[Key, str]:
        """Remove from ``values`` the arguments of components that a later layer replaced.

        ``backbone=resnet18`` over ``{name: small_resnet, width: 32}`` must not keep the width.
        Fields in ``fixed``, given by section, apply to every component there and stay, such as
        the ``lr`` of an optimizer.

        Returns:
            The removed keys with their origins.
        """
        removed: dict[Key, str] = {}
        for place in sorted(named_places(values), key=len, reverse=True):  # data.val before data
            renamed = self._last_renaming(place)
            section = _walk(values, place)[1]
            if not renamed or not isinstance(section, dict):
                continue
            keep = {"name", *fixed.get(place, ())}
            for name in [name for name in section if name not in keep]:
                origin = self.place((*place, name)) or ""
                for layer in self[:renamed]:
                    layer.drop((*place, name))
                if not any(layer.holds((*place, name)) for layer in self[renamed:]):
                    del section[name]
                    removed[(*place, name)] = origin
        return removed

    def is_renamed(self, place: Key) -> bool:
        """Return whether a layer changes the name of the section."""
        return self._last_renaming(place) > 0

    def _last_renaming(self, place: Key) -> int:
        """Return the index of the last layer that changes the name of the section, or 0."""
        name, renamed = None, 0
        for index, layer in enumerate(self):
            found, section = _walk(layer.values, place)
            if not found or not isinstance(section, dict):
                continue
            new = section.get("name", name or default_name(place))
            if name is not None and new != name:
                renamed = index
            name = new
        return renamed


def read_marks(node: yaml.Node | None, shown: str) -> dict[Key, str]:
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


def take_path_texts(values: Any, node: yaml.Node | None, key: Key = ()) -> Any:
    """Return the values with paths as written text: the folder ``1e3`` is not 1000."""
    if isinstance(values, dict) and isinstance(node, yaml.MappingNode):
        inner = {str(name.value): value for name, value in node.value}
        return {
            name: take_path_texts(value, inner.get(str(name)), (*key, str(name)))
            for name, value in values.items()
        }
    if isinstance(values, int | float) and isinstance(node, yaml.ScalarNode) and is_path(key):
        return node.value
    return values


def show_path(path: Path) -> str:
    """Return a path relative to the current folder if it is below that, else unchanged."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _walk(value: Any, key: Key) -> tuple[bool, Any]:
    """Return whether there is a value at ``key``, and the value."""
    for name in key:
        if isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            return False, None
    return True, value
