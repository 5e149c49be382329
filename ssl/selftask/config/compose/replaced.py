"""Remove the arguments of components that a later layer replaces by others.

``backbone=resnet18`` over ``{name: small_resnet, width: 32}`` must not keep the width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from selftask.config.compose.provenance import Layers, value_at
from selftask.config.config_class import config_class
from selftask.config.keys import NAMED, NAMED_ENTRIES, SCHEDULED, SOURCES, Key, default_name
from selftask.config.schema import SHARED
from selftask.registry import METHODS

METHOD: Key = ("method",)


def drop_replaced(values: dict[str, Any], layers: Layers) -> list[str]:
    """Remove from ``values`` and ``layers`` the arguments of replaced components.

    Fields that apply to every component of a section stay, such as the ``lr`` of an optimizer. A
    method keeps those of the replaced method that it has as well.

    Returns:
        A note about the arguments of a replaced method that its replacement does not have.
    """
    removed: list[str] = []
    for section_key in sorted(_named_sections(values), key=len, reverse=True):  # inner ones first
        section, renamed = value_at(values, section_key)[1], _last_renaming(layers, section_key)
        if not renamed or not isinstance(section, dict):
            continue
        keep = {"name", *SHARED.get(section_key, ())}
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
    name = values["method"]["name"]
    return [f"method.name={name} has no {', '.join(removed)}, which the recipe sets: left out"]


def _fields_of_method(name: Any) -> set[str]:
    """Return the config fields of a method; none if it is unknown, which is reported later."""
    config = config_class(METHODS, name) if isinstance(name, str) and name in METHODS else None
    return (
        {f.name for f in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    )


def _last_renaming(layers: Layers, key: Key) -> int:
    """Return the index of the last layer that changes the name of the section, or 0."""
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
    """Return the keys of all sections that may have a ``name``, also in lists of transforms."""
    entries = [(*key, name) for key in sorted(NAMED_ENTRIES) for name in _names_in(values, key)]
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
