"""Plain values into the typed sections of the schema, collecting every problem on the way."""

from __future__ import annotations

import dataclasses
import os
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from selftask.config.compose.provenance import Key, Layers, show_path
from selftask.config.config_class import config_class, config_object
from selftask.config.fields import check_limits, default_of, has_default
from selftask.config.schema import Component
from selftask.config.values.coerce import Mismatch, convert, describe
from selftask.errors import UserError, nearest, shorten
from selftask.registry import REGISTRIES, Registry

MISSING = "???"  # how yaml says that a value must be given
MAX_MESSAGE = 800  # characters


@dataclasses.dataclass(frozen=True)
class Schema:
    """The fields a section may have, and who says so."""

    fields: dict[str, dataclasses.Field[Any]]
    types: dict[str, Any]
    owner: str  # for messages and origins: "simclr (ssl/selftask/methods/simclr.py:31)"

    @classmethod
    def of(cls, config: type | None, owner: str = "", without: Iterable[str] = ()) -> Schema:
        """The schema that a dataclass is; none allows nothing."""
        if config is None:
            return cls({}, {}, owner)
        if not dataclasses.is_dataclass(config):
            raise UserError(
                f"the Config of {owner} is no dataclass; write @dataclass(frozen=True, "
                "kw_only=True) above it"
            )
        fields = {f.name: f for f in dataclasses.fields(config) if f.name not in without}
        try:
            return cls(fields, typing.get_type_hints(config), owner)
        except NameError as error:
            raise UserError(
                f"the Config of {owner}: {error}; its fields may use builtins and typing only"
            ) from error


class Reader:
    """Reads sections; then ``problems`` is all that is wrong, ``places`` where values are from."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.problems: list[str] = []
        self.places: dict[str, str] = {}

    def problem(self, key: Key, text: str) -> None:
        """Note what is wrong with the value at ``key``."""
        place = self.layers.place_or_around(key)
        self.problems.append(shorten(f"{place}: {text}" if place else text, MAX_MESSAGE))

    def mapping(self, value: Any, key: Key) -> dict[str, Any]:
        """``value`` if it is a section, an empty one for null; otherwise a problem."""
        if value is None or isinstance(value, dict):
            return value or {}
        self.problem(key, f"{_dotted(key)}={value!r}: expected a section of key: value pairs")
        return {}

    def section(self, values: dict[str, Any], schema: Schema, key: Key) -> dict[str, Any]:
        """All fields of ``schema``, from ``values`` or by default; wrong ones are left out."""
        result: dict[str, Any] = {}
        for name, field in schema.fields.items():
            if values.get(name, MISSING) != MISSING:
                self._value(result, values[name], field, schema, (*key, name))
            elif name in values and values[name] is None:
                self._value(result, None, field, schema, (*key, name))
            elif has_default(field):
                result[name] = default_of(field)
                owner = f"default of {schema.owner}" if schema.owner else "default"
                self.places[_dotted((*key, name))] = owner
            else:
                of = field.metadata.get("of")
                wanted = f"a list of {of}" if of else describe(schema.types[name])
                self.problem((*key, name), f"{_dotted((*key, name))} is missing: {wanted}")
        return result

    def unknown_keys(self, values: dict[str, Any], key: Key, *schemas: Schema) -> None:
        """A problem for each key that no schema has."""
        known = {name: field for schema in schemas for name, field in schema.fields.items()}
        owner = next((f" of {schema.owner}" for schema in reversed(schemas) if schema.owner), "")
        for name in values:
            if name not in known:
                wrong = _dotted((*key, str(name)))
                hint = hint_for(str(name), known, key)
                self.problem((*key, str(name)), f"unknown key {wrong!r}{owner}; {hint}")

    def component(
        self, value: Any, registry: Registry, key: Key, *, ours: Schema | None = None
    ) -> tuple[Component | None, dict[str, Any]]:
        """A named thing, and the values of ``ours``: the section's fields that it does not own.

        None for the thing where its name is unknown or missing.
        """
        if not isinstance(value, dict):
            wanted = f"expected the name of a {registry.kind} or a section with `name`"
            self.problem(key, f"{_dotted(key)}={value!r}: {wanted}")
            return None, {}
        ours = ours or Schema.of(None)
        fixed = self.section(value, ours, key)
        name = value.get("name", MISSING)
        if name == MISSING or not isinstance(name, str):
            self.problem((*key, "name"), f"{_dotted(key)} needs the name of a {registry.kind}")
            return None, fixed
        self.note_place((*key, "name"))
        own = {k: v for k, v in value.items() if k != "name" and k not in ours.fields}
        if name not in registry:
            if classy_has(registry.kind, name):
                for field in own:
                    self.note_place((*key, field))
                if registry.kind == "hook" and (refused := _classy_refusal(name)):
                    self.problem((*key, "name"), refused)
                return Component(name=name, args=own), fixed
            hint = nearest(name, registry.names())
            if registry.kind in _CLASSY:
                hint += "; Classy Vision's are written classy:NAME"
            self.problem((*key, "name"), f"no {registry.kind} named {name!r}; {hint}")
            return None, fixed
        schema = schema_of(registry, name)
        self.unknown_keys(own, key, ours, schema)
        return Component(name=name, args=self.section(own, schema, key)), fixed

    def components(self, value: Any, registry: Registry, key: Key) -> dict[str, Component]:
        """``key: {args}`` entries, with an optional ``name``; null ones are left out."""
        found = {}
        for name, entry in self.mapping(value, key).items():
            inner = (*key, str(name))
            self.note_place(inner)
            if entry is None:
                continue
            named = {"name": name, **entry} if isinstance(entry, dict) else entry
            component, _ = self.component(named, registry, inner)
            if component is not None:
                found[str(name)] = component
        return found

    def pipeline(self, value: Any, registry: Registry, key: Key) -> list[Component]:
        """A list of named things."""
        if value is None:
            return []
        if not isinstance(value, list):
            self.problem(key, f"{_dotted(key)}={value!r}: expected a list of {registry.kind}s")
            return []
        read = []
        for index, item in enumerate(value):
            inner = (*key, str(index))
            entry = {"name": item} if isinstance(item, str) else item
            read.append(self.component(entry, registry, inner)[0])
            if isinstance(item, str):
                self.places[_dotted((*inner, "name"))] = self.layers.place(inner) or "default"
        return [component for component in read if component is not None]

    def _nested(self, value: Any, registry: Registry, annotation: Any, key: Key) -> list[Any]:
        """A list of named things, or of such lists, within a named thing; as in the yaml."""
        (inner,) = typing.get_args(annotation)
        if typing.get_origin(inner) is not list:
            return [component.to_dict() for component in self.pipeline(value, registry, key)]
        if not isinstance(value, list):
            wanted = f"expected a list of lists of {registry.kind}s"
            self.problem(key, f"{_dotted(key)}={_shown(value)}: {wanted}")
            return []
        return [
            self._nested(item, registry, inner, (*key, str(index)))
            for index, item in enumerate(value)
        ]

    def _value(
        self, result: dict[str, Any], value: Any, field: Any, schema: Schema, key: Key
    ) -> None:
        if "of" in field.metadata:  # the registry that its named things are from
            registry = REGISTRIES[field.metadata["of"]]
            result[field.name] = self._nested(value, registry, schema.types[field.name], key)
            self.note_place(key)
            return
        try:
            converted = convert(value, schema.types[field.name])
            check_limits(converted, field.metadata)
        except (Mismatch, ValueError) as error:
            self.problem(key, f"{_dotted(key)}={_shown(value)}: {error}")
            return
        self.note_place(key)
        is_path = field.metadata.get("path") and converted is not None
        result[field.name] = os.path.expanduser(converted) if is_path else converted

    def note_place(self, key: Key) -> None:
        """Remember where the value at ``key`` comes from."""
        place = self.layers.place(key)
        self.places[_dotted(key)] = place or "default"


def schema_of(registry: Registry, name: str) -> Schema:
    """The schema of a named thing."""
    address = registry.address(name)
    owner = f"{name} ({show_path(address.path)}:{address.line})"
    return Schema.of(config_class(registry, name), owner)


def hint_for(name: str, known: Mapping[str, dataclasses.Field[Any]], key: Key) -> str:
    """``did you mean 'optimizer.lr'?``, also for what other frameworks call it."""
    words = {word: right for right, f in known.items() for word in f.metadata.get("also", ())}
    words |= {right: right for right in known}
    close = get_close_matches(name, words, n=1)
    return f"did you mean {_dotted((*key, words[close[0]]))!r}?" if close else nearest(name, known)


def iter_problems(
    component: Component, registry: Registry, key: Key, whole: dict[str, Any]
) -> Iterator[tuple[Key, str]]:
    """What a named thing itself has against its own and the whole config, with the keys meant."""
    for nested, its_registry, place in inner_components(component, registry, key):
        yield from iter_problems(nested, its_registry, place, whole)
    config = _config_class(component, registry)
    if not hasattr(config, "problems"):
        return
    for message in config_object(config, component.args).problems(whole):
        name, _, rest = message.partition(":")
        path = tuple(name.split("."))
        if path[0] in component.args:
            yield (*key, *path), f"{_dotted((*key, *path))}:{rest}"
        else:
            yield path if path[0] in whole else key, message


def inner_components(
    component: Component, registry: Registry, key: Key
) -> Iterator[tuple[Component, Registry, Key]]:
    """The named things in the arguments of a named thing, one level deep."""
    config = _config_class(component, registry)
    for field in dataclasses.fields(config) if config else ():
        if "of" in field.metadata:
            for nested, place in _named_in(component.args.get(field.name), (*key, field.name)):
                yield nested, REGISTRIES[field.metadata["of"]], place


def _config_class(component: Component, registry: Registry) -> Any:
    """None where there is nothing to configure, as for what is Classy's."""
    return config_class(registry, component.name) if component.name in registry else None


def _named_in(value: Any, key: Key) -> Iterator[tuple[Component, Key]]:
    """The named things in a list, or in the lists in it, with their keys."""
    if isinstance(value, dict):
        args = {name: item for name, item in value.items() if name != "name"}
        yield Component(name=value["name"], args=args), key
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _named_in(item, (*key, str(index)))


_CLASSY = {"hook": "hooks", "meter": "meters", "optimizer": "optim", "schedule": "optim"}


def classy_has(kind: str, name: str) -> bool:
    """Whether Classy Vision has ``name``, asked only where a typo does not import all of Classy.

    That is: for ``classy:NAME``, and for any name once a user's module has imported the part of
    Classy in which it registers.
    """
    loaded = kind in _CLASSY and f"classy_vision.{_CLASSY[kind]}" in sys.modules
    if not loaded and not name.startswith("classy:"):
        return False
    from selftask import classy

    return classy.has(kind, name)


def _classy_refusal(name: str) -> str | None:
    from selftask import classy

    return classy.refusal(name)


def _dotted(key: Key) -> str:
    return ".".join(key)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value).replace("None", "null")
