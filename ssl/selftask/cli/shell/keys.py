"""Completions of a word ``key=value``: keys and values of a config."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import Field, dataclass, fields, is_dataclass
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
_NO_FIELDS = Schema.of(None)


@dataclass(frozen=True)
class Completions:
    """Possible values and inner keys of a key.

    Args:
        schema: Fields of a section; empty for a plain value.
        names: Registry whose names are valid values.
        entries: Registry whose names are valid inner keys, as for ``hooks``.
        kind: Type of a plain value.
        is_entry: Whether the key is an entry of a mapping, which ``{}`` adds and ``null`` removes.
    """

    schema: Schema = _NO_FIELDS
    names: Registry | None = None
    entries: Registry | None = None
    kind: Any = None
    is_entry: bool = False

    @property
    def keys(self) -> list[str]:
        """Names of the inner keys; empty for a plain value."""
        if self.entries is not None:
            return self.entries.names()
        if self.schema is SCHEMA:
            return [*(name for name in self.schema.fields if name not in _GIVEN), *_BESIDE]
        return list(self.schema.fields)


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
        values = [text for text in _values(completions_of(key, named)) if text.startswith(value)]
        if is_path(tuple(key.split("."))):
            values += path_candidates(value, endings=("",))
        return [f"{key}={text}" for text in values]
    parent, dot, start = key.rpartition(".")
    names = [name for name in completions_of(parent, named).keys if name.startswith(start)]
    keys = [f"{parent}{dot}{name}" for name in names]
    return [f"{key}{end}" for key in keys for end in _ends(completions_of(key, named))]


def _names_in(words: list[str]) -> dict[str, str]:
    """Return the names of method, optimizer, ... on the command line, by key."""
    pairs = [word.partition("=")[::2] for word in words if "=" in word]
    method = {"method": words[0].partition("/")[0]} if words and "=" not in words[0] else {}
    return {**method, **{key.removesuffix(".name"): value for key, value in pairs}}


def completions_of(key: str, named: dict[str, str]) -> Completions:
    """Return the possible values and inner keys of a dotted key; nothing if the key is unknown.

    Args:
        key: The key; empty for the whole config.
        named: Names of the components on the command line, by key.
    """
    completions = Completions(schema=SCHEMA)
    names = key.split(".") if key else []
    for number, name in enumerate(names, 1):
        if completions.entries is not None:
            completions = Completions(schema=_component(completions.entries, name), is_entry=True)
        elif name in completions.schema.fields:
            chosen = named.get(".".join(names[:number]), "")
            completions = _of_field(
                completions.schema.fields[name], completions.schema.types[name], chosen
            )
        else:
            completions = Completions()
    return completions


def _of_field(field: Field[Any], kind: Any, name: str) -> Completions:
    """Return the possible values and inner keys of a field.

    ``name`` is the name of its component on the command line, or empty.
    """
    registry = REGISTRIES.get(field.metadata.get("of", ""))
    options = _options(kind)
    if not name and isinstance(field.default, Component):
        name = field.default.name
    component = next((o for o in options if isinstance(o, type) and issubclass(o, Component)), None)
    section: Any = next((o for o in options if is_dataclass(o) and o is not component), None)
    if section is not None:
        flat = next((f for f in fields(section) if f.metadata.get("flat")), None)
        if flat is None:
            return Completions(schema=Schema.of(section), kind=kind)
        kinds = REGISTRIES[flat.metadata["of"]]
        schema = Schema.of(section, without=[flat.name, "args"])
        return Completions(schema=schema | _component(kinds, name), names=kinds, kind=kind)
    if registry is not None and typing.get_origin(options[0]) is dict and len(options) == 1:
        return Completions(entries=registry)
    if registry is not None and component is not None:
        shared = Schema.of(component, without=["name", "args"])
        return Completions(schema=shared | _component(registry, name), names=registry)
    return Completions(names=registry, kind=kind)


def _component(registry: Registry, name: str) -> Schema:
    """Return the fields of a component, or no fields for an unknown name."""
    return Schema.of(config_class(registry, name) if name in registry else None)


def _options(kind: Any) -> list[Any]:
    """Return the members of a union other than None, or the type itself."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [part for part in typing.get_args(kind) if part is not type(None)]
    return [kind]


def _ends(completions: Completions) -> Iterator[str]:
    """Yield ``=`` if a key takes a value, and ``.`` if it has inner keys."""
    plain = any(not is_dataclass(option) for option in _options(completions.kind) if option)
    if not completions.keys or plain or completions.names is not None or completions.is_entry:
        yield "="
    if completions.keys:
        yield "."


def _values(completions: Completions) -> list[str]:
    """Return the values of a key that can be listed: names, choices, true, false, null and {}."""
    values = completions.names.names() if completions.names is not None else []
    values += ["{}", "null"] if completions.is_entry else []
    for option in _options(completions.kind):
        if typing.get_origin(option) is typing.Literal:
            values += [_text(value) for value in typing.get_args(option)]
        elif option is bool:
            values += ["true", "false"]
    return values


def _text(value: Any) -> str:
    """Return a choice as it is written in yaml."""
    return str(value).lower() if isinstance(value, bool) else str(value)
