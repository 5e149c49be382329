"""Layers of a config: the values of each file and of the command line, with their lines.

Merging loses the origin of a value, so the values before merging are kept as layers.
``Layers.place(key)`` returns ``configs/simclr/digits.yaml:7`` or
``command line: train.epochs=3``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selftask.config.compose.merging import value_at
from selftask.config.config_class import config_class
from selftask.config.keys import NAMED, NAMED_ENTRIES, SCHEDULED, SOURCES, Key, default_name, dotted
from selftask.config.schema.config import SHARED
from selftask.errors import shorten
from selftask.registry import METHODS

METHOD: Key = ("method",)
OPTIMIZERS: Key = ("optimizers",)
MAX_MESSAGE = 800  # characters


@dataclass
class Layer:
    """Values of one file or of the command line, and the origins of its keys."""

    values: dict[str, Any]
    marks: dict[Key, str] = field(default_factory=dict)
    file: str = ""  # path or address of the file, for messages

    def holds(self, key: Key) -> bool:
        """Return whether this layer sets ``key``."""
        return value_at(self.values, key)[0]

    def value(self, key: Key) -> Any:
        """Return the value of ``key`` in this layer, or None."""
        return value_at(self.values, key)[1]

    def replaces(self, key: Key) -> bool:
        """Return whether this layer sets ``key``, or a section around it, to a non-section value.

        If so, merging ignored the value of earlier layers.
        """
        return any(
            is_set and not isinstance(value, dict)
            for is_set, value in (value_at(self.values, key[:n]) for n in range(1, len(key) + 1))
        )

    def place(self, key: Key) -> str | None:
        """Return the origin of ``key``, else of the section that contains it, else None."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.marks:
                return self.marks[key[:length]]
        return None

    def record(self, key: Key, value: Any, origin: str) -> None:
        """Set ``key`` as an override does: sections are merged, other values replaced.

        Args:
            key: Key of the value.
            value: A plain value, or a section as a dict.
            origin: Origin of the value, for messages.
        """
        self.marks[key] = origin
        if isinstance(value, dict) and value:
            for name, item in value.items():
                self.record((*key, name), item, origin)
            return
        section = self.values
        for name in key[:-1]:
            inner = section.get(name)
            section[name] = section = inner if isinstance(inner, dict) else {}
        section[key[-1]] = value

    def drop(self, key: Key) -> None:
        """Remove ``key`` from this layer."""
        is_set, parent = value_at(self.values, key[:-1])
        if is_set and isinstance(parent, dict):
            parent.pop(key[-1], None)


class Layers(list[Layer]):
    """List of all layers; later ones override earlier ones."""

    def place(self, key: Key) -> str | None:
        """Return the origin of the value at ``key``, or None if no layer sets it."""
        for layer in reversed(self):
            if layer.holds(key):
                return layer.place(key)
            if layer.replaces(key):
                return None
        return None

    def place_or_around(self, key: Key) -> str | None:
        """Return the origin of ``key``, or the nearest one that is known, or None.

        If ``key`` has no origin, that of a key inside it is returned. If there is none either, the
        same is tried for each section around ``key``, the innermost first; the result may then be
        the origin of another key of that section.
        """
        for length in range(len(key), 0, -1):
            origin = self.place(key[:length]) or self._place_inside(key[:length])
            if origin is not None:
                return origin
        return None

    def located(self, key: Key, text: str) -> str:
        """Return ``text``, a problem with the value at ``key``, preceded by the value's origin.

        If the text already begins with the override (``key=value``), the origin does not repeat it.
        """
        origin = self.place_or_around(key)
        name, _, value = (origin or "").removeprefix("command line: ").partition("=")
        bare = str.maketrans("", "", "'\" ")  # the text may have other quotes and spaces
        repeated = text.translate(bare).startswith(f"{name}={value}".translate(bare))
        if name == dotted(key) and (repeated or text.startswith(f"{name}: {value};")):
            origin = "command line"
        return shorten(f"{origin}: {text}" if origin else text, MAX_MESSAGE)

    def _place_inside(self, key: Key) -> str | None:
        marks = [m for layer in reversed(self) for m in layer.marks.items()]
        return next((origin for inner, origin in marks if inner[: len(key)] == key), None)


def show_path(path: Path) -> str:
    """Return a path as text, relative to the current folder if it is below that."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def drop_replaced(values: dict[str, Any], layers: Layers) -> list[str]:
    """Remove the arguments of replaced components from the merged values, in place.

    Fields that apply to every component of a section are kept, such as the ``lr`` of an optimizer.
    If a method is replaced, arguments that the new method also has are kept.

    Args:
        values: The values of all layers, with unresolved references.
        layers: The layers; the arguments are removed from these, too.

    Returns:
        A list with a note about the dropped arguments of a replaced method, if any.
    """
    removed: list[str] = []
    for section_key in sorted(_named_sections(values), key=len, reverse=True):  # inner ones first
        section, renamed = value_at(values, section_key)[1], _last_renaming(layers, section_key)
        if not renamed or not isinstance(section, dict):
            continue
        keep = {"name", *SHARED.get(section_key, SHARED.get(section_key[:-1], ()))}
        if section_key == METHOD:
            keep |= _fields_of_method(section.get("name"))
        for name in [name for name in section if name not in keep]:
            key = (*section_key, name)
            origin = layers.place(key)
            for layer in layers[:renamed]:
                layer.drop(key)
            if not any(layer.holds(key) for layer in layers[renamed:]):
                del section[name]
                removed += [f"{name} ({origin})"] if section_key == METHOD else []
    if not removed:
        return []
    text = f"has no {', '.join(removed)}, which the recipe sets: left out"
    return [f"method.name={values['method']['name']} {text}"]


def _fields_of_method(name: Any) -> set[str]:
    """Return the config fields of a method; none if it is unknown, which is reported later."""
    config = config_class(METHODS, name) if isinstance(name, str) and name in METHODS else None
    return (
        {f.name for f in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    )


def _last_renaming(layers: Layers, key: Key) -> int:
    """Return the index of the last layer that changes the ``name`` in the section, or 0."""
    name, renamed = None, 0
    for index, layer in enumerate(layers):
        section = layer.value(key)
        if not isinstance(section, dict):
            continue
        new = section.get("name", name or default_name(key))
        if name is not None and new != name:
            renamed = index
        name = new
    return renamed


def _named_sections(values: dict[str, Any]) -> list[Key]:
    """Return the keys of all sections that may have a ``name``, including transforms in lists."""
    by_name = sorted({*NAMED_ENTRIES, OPTIMIZERS})
    entries = [(*key, name) for key in by_name for name in _names_in(values, key)]
    lists: list[Key] = [("eval", "transforms")]
    lists += [("views", group, "transforms") for group in _names_in(values, ("views",))]
    transforms = [item for key in lists for item in _named_items(value_at(values, key)[1], key)]
    return [*sorted(NAMED | SCHEDULED | SOURCES), *entries, *transforms]


def _named_items(value: Any, key: Key) -> Iterator[Key]:
    """Yield the keys of sections with a ``name`` in a list and in nested lists."""
    for index, item in enumerate(value if isinstance(value, list) else ()):
        inner = (*key, str(index))
        if isinstance(item, dict) and "name" in item:
            yield inner
            for field, nested in item.items():
                yield from _named_items(nested, (*inner, field))


def _names_in(values: dict[str, Any], key: Key) -> list[str]:
    section = value_at(values, key)[1]
    return list(section) if isinstance(section, dict) else []
