"""Layers of a config: the values of each file and of the command line, with their lines.

Merging loses the origin of a value, so the values before merging are kept as layers.
``Layers.place(key)`` returns ``configs/simclr/digits.yaml:7`` or
``command line: train.epochs=3``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selftask.config.keys import Key, dotted
from selftask.errors import shorten

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
        """Return whether this layer holds a list or a plain value at or above ``key``.

        If so, merging ignored the value of earlier layers.
        """
        return any(
            is_set and not isinstance(value, dict)
            for is_set, value in (value_at(self.values, key[:n]) for n in range(1, len(key) + 1))
        )

    def place(self, key: Key) -> str | None:
        """Return the origin of ``key``, or else of the section that contains it."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.marks:
                return self.marks[key[:length]]
        return None

    def record(self, key: Key, value: Any, place: str) -> None:
        """Set ``key`` as an override does: sections are merged, other values replaced.

        Args:
            key: Key of the value.
            value: A plain value, or a section as a dict.
            place: Origin of the value, for messages.
        """
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
        is_set, parent = value_at(self.values, key[:-1])
        if is_set and isinstance(parent, dict):
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

    def located(self, key: Key, text: str) -> str:
        """Return the message of a problem with the value at ``key``, preceded by its origin.

        If the message already begins with the override (``key=value``), it is not repeated.
        """
        place = self.place_or_around(key)
        name, _, value = (place or "").removeprefix("command line: ").partition("=")
        shown = (f"={value}", f"={value!r}", f"={value.replace(',', ', ')}", f": {value};")
        if name == dotted(key) and text.startswith(tuple(name + form for form in shown)):
            place = "command line"
        return shorten(f"{place}: {text}" if place else text, MAX_MESSAGE)

    def _place_inside(self, key: Key) -> str | None:
        marks = [m for layer in reversed(self) for m in layer.marks.items()]
        return next((place for inner, place in marks if inner[: len(key)] == key), None)


def show_path(path: Path) -> str:
    """Return a path relative to the current folder if it is below that, else unchanged."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


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
