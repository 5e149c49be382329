"""Completions of a word ``key=value``: keys and values of a config."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import Field, dataclass, is_dataclass, replace
from typing import Any

from selftask.cli.shell.paths import path_candidates
from selftask.config.config_class import config_class
from selftask.config.keys import is_path
from selftask.config.schema import Component
from selftask.config.schema_reader import SCHEMA
from selftask.config.values.section_schema import Schema
from selftask.registry import REGISTRIES, Registry

_BESIDE = ("import",)  # keys that are not fields of Config
_GIVEN = ("recipe",)  # a field that is not a key


@dataclass(frozen=True)
class Place:
    """Possible values and inner keys of a key.

    Args:
        schema: Fields of a section; None for a plain value.
        names: Registry whose names are valid values.
        entries: Registry whose names are valid inner keys, as for ``hooks``.
        kind: Type of a plain value.
        is_entry: Whether the key is an entry of a mapping, which ``{}`` adds and ``null`` removes.
    """

    schema: Schema | None = None
    names: Registry | None = None
    entries: Registry | None = None
    kind: Any = None
    is_entry: bool = False


def override_candidates(word: str, before: list[str]) -> list[str]:
    """Return the completions of ``word`` to ``key=value``, as whole words.

    Args:
        word: The beginning of a key, or a key with the beginning of its value after ``=``.
        before: The words between the command and this one. A recipe or ``optimizer=sgd`` among
            them determines the valid keys.
    """
    key, equals, value = word.partition("=")
    named = _names_in(before)
    if equals:
        return [f"{key}={text}" for text in _values(key, named) if text.startswith(value)] + [
            f"{key}={path}" for path in _paths(key, value)
        ]
    parent, dot, start = key.rpartition(".")
    place = place_of(tuple(parent.split(".")) if parent else (), named)
    names = [name for name in _keys(place) if name.startswith(start)]
    keys = []
    for name in names if place is not None else ():
        whole = f"{parent}{dot}{name}"
        keys += [f"{whole}{end}" for end in _ends(place_of(tuple(whole.split(".")), named))]
    return keys


def _names_in(words: list[str]) -> dict[str, str]:
    """Return the names of method, optimizer, ... on the command line, by key."""
    pairs = [word.partition("=")[::2] for word in words if "=" in word]
    method = {"method": words[0].partition("/")[0]} if words and "=" not in words[0] else {}
    return {**method, **{key.removesuffix(".name"): value for key, value in pairs}}


def place_of(key: tuple[str, ...], named: dict[str, str]) -> Place | None:
    """Return the possible values and inner keys of a key, or None for an unknown key."""
    place: Place | None = Place(schema=SCHEMA)
    for number, name in enumerate(key):
        if place is None:
            return None
        if place.entries is not None:
            place = replace(_component(place.entries, name), is_entry=True)
        elif place.schema is not None and name in place.schema.fields:
            dotted = ".".join(key[: number + 1])
            kind = place.schema.types[name]
            place = _of_field(place.schema.fields[name], kind, named.get(dotted, ""))
        else:
            place = Place(kind=list) if number == 0 and name in _BESIDE else None
    return place


def _of_field(field: Field[Any], kind: Any, name: str) -> Place:
    """Return the possible values and inner keys of a field.

    ``name`` is the name of its component on the command line, or empty.
    """
    registry = REGISTRIES.get(field.metadata.get("of", ""))
    options = _options(kind)
    if not name and isinstance(field.default, Component):
        name = field.default.name
    component = next((o for o in options if isinstance(o, type) and issubclass(o, Component)), None)
    section = next((o for o in options if is_dataclass(o) and o is not component), None)
    if section is not None:
        schema = Schema.of(typing.cast(type, section))
        flat = next((f for f in schema.fields.values() if f.metadata.get("flat")), None)
        if flat is None:
            return Place(schema=schema, kind=kind)
        kinds = REGISTRIES[flat.metadata["of"]]
        schema = Schema.of(typing.cast(type, section), without=[flat.name, "args"])
        return Place(schema=_joined(schema, _component(kinds, name)), names=kinds, kind=kind)
    if registry is not None and typing.get_origin(options[0]) is dict and len(options) == 1:
        return Place(entries=registry)
    if registry is not None and component is not None:
        shared = Schema.of(component, without=["name", "args"])
        return Place(schema=_joined(shared, _component(registry, name)), names=registry)
    return Place(names=registry, kind=kind)


def _component(registry: Registry, name: str) -> Place:
    """Return the fields of a component, or no fields for an unknown name."""
    config = config_class(registry, name) if name in registry else None
    return Place(schema=Schema.of(config))


def _joined(schema: Schema | None, other: Place) -> Schema:
    return (schema or Schema({}, {}, "")) | (other.schema or Schema({}, {}, ""))


def _options(kind: Any) -> list[Any]:
    """Return the members of a union other than None, or the type itself."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [part for part in typing.get_args(kind) if part is not type(None)]
    return [kind]


def _keys(place: Place | None) -> list[str]:
    if place is None:
        return []
    if place.entries is not None:
        return place.entries.names()
    if place.schema is None:
        return []
    is_top = place.schema is SCHEMA
    names = [name for name in place.schema.fields if not (is_top and name in _GIVEN)]
    return [*names, *(_BESIDE if is_top else ())]


def _ends(place: Place | None) -> Iterator[str]:
    """Yield ``=`` if a key takes a value, and ``.`` if it has inner keys."""
    below = bool(_keys(place))
    plain = place is not None and any(not is_dataclass(o) for o in _options(place.kind) if o)
    if place is None or not below or plain or place.names is not None or place.is_entry:
        yield "="
    if below:
        yield "."


def _values(key: str, named: dict[str, str]) -> list[str]:
    """Return the values of a key that can be listed: names, choices, true, false, null and {}."""
    place = place_of(tuple(key.split(".")), named)
    if place is None:
        return []
    values = place.names.names() if place.names is not None else []
    values += ["{}", "null"] if place.is_entry else []
    for option in _options(place.kind):
        if typing.get_origin(option) is typing.Literal:
            values += [_text(value) for value in typing.get_args(option)]
        elif option is bool:
            values += ["true", "false"]
    return values


def _paths(key: str, value: str) -> list[str]:
    return path_candidates(value, endings=("",)) if is_path(tuple(key.split("."))) else []


def _text(value: Any) -> str:
    """Return a choice as it is written in yaml."""
    return str(value).lower() if isinstance(value, bool) else str(value)
