"""Convert plain values to dataclasses by the types of their fields, and collect all problems."""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import typing
from collections.abc import Collection
from typing import Any, TypeVar

from selftask.config.checks.grid import with_image_size
from selftask.config.classy_names import classy_has, guest_problem
from selftask.config.compose.provenance import Layers
from selftask.config.fields import default_of, has_default, setting
from selftask.config.keys import Key, dotted
from selftask.config.schema import Component, Config, FrozenModule
from selftask.config.values.coerce import Mismatch, check_limits, convert, describe
from selftask.config.values.section_schema import Schema, schema_of
from selftask.errors import nearest
from selftask.registry import REGISTRIES, SCHEDULES, Registry

MISSING = "???"  # OmegaConf's mark for a required value
_WRONG = object()  # returned for an invalid value

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shorthand:
    """Top-level keys that are short for several others."""

    image_size: int | None = setting(None, min=1)
    """Height and width of views, evaluated images and a vision transformer, in pixels."""


SCHEMA = Schema.of(Config, without=["imports", "places", "notes"]) | Schema.of(Shorthand)
_IMPORT = Schema({"import": Config.__dataclass_fields__["imports"]}, {}, "")


def read_config(
    values: dict[str, Any], layers: Layers, invalid: Collection[Key]
) -> tuple[Config | None, list[str]]:
    """Return the config, or None if a field of it is invalid, and a message for each problem.

    Args:
        values: Plain values of all layers, merged.
        layers: The layers, for the origin of each value.
        invalid: Keys whose overrides are invalid; they are not reported as missing.
    """
    reader = Reader(layers, invalid)
    reader.unknown_keys(values, (), SCHEMA, _IMPORT)
    sections = reader.fields(values, SCHEMA, ())
    imports = values.get("import") or []
    reader.note_place(("import",))
    if len(sections) < len(SCHEMA.fields):
        return None, reader.problems
    size = sections.pop("image_size")
    names = [imports] if isinstance(imports, str) else list(imports)
    config = Config(**sections, imports=names, places=reader.places)
    if size is None:
        return config, reader.problems
    config, problems = with_image_size(config, size, layers)
    return config, [*reader.problems, *(layers.located(key, text) for key, text in problems)]


class Reader:
    """Reader of sections; collects ``problems``, and the origin of each value in ``places``.

    In all methods, ``value`` is the plain value at ``key``, and ``registry`` is the registry of the
    components in it.
    """

    def __init__(self, layers: Layers, invalid: Collection[Key]) -> None:
        self.layers = layers
        self.invalid = invalid
        self.problems: list[str] = []
        self.places: dict[str, str] = {}

    def problem(self, key: Key, text: str) -> None:
        """Add a problem with the value at ``key``."""
        self.problems.append(self.layers.located(key, text))

    def mapping(self, value: Any, key: Key) -> dict[str, Any]:
        """Return ``value`` if it is a section, else an empty dict; add a problem unless null."""
        if value is None or isinstance(value, dict):
            return value or {}
        self.problem(key, f"{dotted(key)}={value!r}: expected a section of key: value pairs")
        return {}

    def section(self, kind: type[T], value: Any, key: Key) -> T | None:
        """Return a section as the dataclass ``kind``, or None if one of its fields is invalid."""
        schema = Schema.of(kind)
        if kind is FrozenModule and isinstance(value, str):
            value = {"model": value}
            self.note_place((*key, "model"))
        flat = next((f for f in schema.fields.values() if f.metadata.get("flat")), None)
        if flat is not None:
            return self._flat_section(kind, value, flat, key)
        values = self.mapping(value, key)
        self.unknown_keys(values, key, schema)
        read = self.fields(values, schema, key)
        return kind(**read) if len(read) == len(schema.fields) else None

    def _flat_section(
        self, kind: type[T], value: Any, flat: dataclasses.Field[Any], key: Key
    ) -> T | None:
        """Return a section in which the keys of the component in field ``flat`` are not nested."""
        ours = Schema.of(kind, without=[flat.name, "args"])
        component, read = self.component(value, REGISTRIES[flat.metadata["of"]], key, ours=ours)
        if component is None or len(read) < len(ours.fields):
            return None
        nested = Schema.of(kind).types[flat.name] is Component
        named = (
            {flat.name: component} if nested else {"name": component.name, "args": component.args}
        )
        return kind(**named, **read)

    def fields(self, values: dict[str, Any], schema: Schema, key: Key) -> dict[str, Any]:
        """Return the fields of ``schema`` from ``values`` or their defaults; omit invalid ones."""
        result: dict[str, Any] = {}
        for name, field in schema.fields.items():
            inner, kind = (*key, name), schema.types[name]
            is_set = values.get(name, MISSING) != MISSING
            value = values[name] if is_set else None
            default = default_of(field)
            if isinstance(default, Component) and isinstance(value, dict | None):
                value = {"name": default.name, **(value or {})}
            elif not is_set and has_default(field):
                result[name] = default
                owner = f"default of {schema.owner}" if schema.owner else "default"
                self.places[dotted(inner)] = owner
                continue
            elif value is None and ("missing" in field.metadata or not (is_set or _holds(kind))):
                wanted = field.metadata.get("missing") or _wanted(field, kind)
                if inner not in self.invalid:
                    self.problem(inner, f"{dotted(inner)} is missing: {wanted}")
                continue
            read = self._read(value, field, schema, inner)
            if read is not _WRONG:
                result[name] = read
        return result

    def _read(self, value: Any, field: dataclasses.Field[Any], schema: Schema, key: Key) -> Any:
        """Read the value of one field by its type; return ``_WRONG`` after a problem."""
        kind = schema.types[field.name]
        if "of" in field.metadata:
            return self._named(value, field, schema, key)
        sections = [option for option in typing.get_args(kind) if dataclasses.is_dataclass(option)]
        if sections and type(None) in typing.get_args(kind):
            if value is None:
                return None
            (kind,) = sections
        if dataclasses.is_dataclass(kind):
            read = self.section(kind, value, key)  # type: ignore[arg-type]
            return _WRONG if read is None else read
        if typing.get_origin(kind) is list and dataclasses.is_dataclass(typing.get_args(kind)[0]):
            return self._sections(value, typing.get_args(kind)[0], key)
        if _holds(kind):
            return self._groups(value, typing.get_args(kind)[1], key)
        return self._plain(value, field, kind, key)

    def _plain(self, value: Any, field: dataclasses.Field[Any], kind: Any, key: Key) -> Any:
        """Read a value that is neither a section nor a component."""
        converted = self._checked(value, kind, field, key)
        if converted is _WRONG:
            return _WRONG
        self.note_place(key)
        is_path = field.metadata.get("path") and converted is not None
        return os.path.expanduser(converted) if is_path else converted

    def _checked(self, value: Any, kind: Any, field: dataclasses.Field[Any], key: Key) -> Any:
        """Return a value as ``kind`` and within the field's limits; ``_WRONG`` after a problem."""
        try:
            converted = convert(value, kind)
            check_limits(converted, field.metadata)
        except (Mismatch, ValueError) as error:
            self.problem(key, f"{dotted(key)}={_shown(value)}: {error}")
            return _WRONG
        return converted

    def _groups(self, value: Any, kind: type, key: Key) -> Any:
        """Read a mapping of sections; null removes a section that an earlier layer sets."""
        below = [layer.value(key) for layer in self.layers]
        sections = [section for section in below if isinstance(section, dict)]
        names = {str(name) for section in sections for name, v in section.items() if v is not None}
        made: dict[str, Any] = {}
        for name, section in self.mapping(value, key).items():
            inner = (*key, str(name))
            if section is not None:
                made[str(name)] = self.section(kind, section, inner)
            elif str(name) not in names:
                self.problem(inner, f"unknown key {dotted(inner)!r}; {nearest(str(name), names)}")
        return _WRONG if None in made.values() else made

    def _sections(self, value: Any, kind: type, key: Key) -> Any:
        """Read a list of sections."""
        self.note_place(key)
        if not isinstance(value, list):
            self.problem(key, f"{dotted(key)}={_shown(value)}: expected a list of sections")
            return _WRONG
        read = [self.section(kind, item, (*key, str(i))) for i, item in enumerate(value)]
        return _WRONG if None in read else read

    def _named(self, value: Any, field: dataclasses.Field[Any], schema: Schema, key: Key) -> Any:
        """Read a component, a schedule, or a list or mapping of components."""
        registry, kind = REGISTRIES[field.metadata["of"]], schema.types[field.name]
        self.note_place(key)
        if registry is SCHEDULES and typing.get_origin(kind) is not list:
            return self._scheduled(value, field, kind, key)
        if typing.get_origin(kind) is dict:
            inner = typing.get_args(kind)[1]
            if typing.get_origin(inner) is not list:
                return self.components(value, field, schema, key)
            lists = self.mapping(value, key).items()
            return {name: self._nested(v, registry, inner, (*key, str(name))) for name, v in lists}
        if kind == list[Component]:
            return self.pipeline(value, registry, key)
        if typing.get_origin(kind) is list:
            return self._nested(value, registry, kind, key)
        return None if value is None else self._one_named(value, field, schema, key)

    def _one_named(
        self, value: Any, field: dataclasses.Field[Any], schema: Schema, key: Key
    ) -> Any:
        """Read one component, with the fields of its class and the shared fields of its section."""
        registry, kind = REGISTRIES[field.metadata["of"]], schema.types[field.name]
        kind = next(
            option
            for option in (kind, *typing.get_args(kind))
            if isinstance(option, type) and issubclass(option, Component)
        )
        own = Schema.of(kind, without=["name", "args"])
        ours = own | schema.shared_by(field)
        component, values = self.component(value, registry, key, ours=ours)
        if component is None or not own.fields.keys() <= values.keys():
            return _WRONG
        return kind.joined(component, values)

    def _scheduled(self, value: Any, field: dataclasses.Field[Any], kind: Any, key: Key) -> Any:
        """Read a number or a schedule, which is a name or a section, without adding defaults.

        A section without a name changes fields of the default schedule.
        """
        options = typing.get_args(kind)
        if typing.get_origin(kind) is tuple:
            if not isinstance(value, list | tuple) or len(value) != len(options):
                return self._plain(value, field, kind, key)
            items = enumerate(zip(value, options, strict=True))
            read = [self._scheduled(v, field, o, (*key, str(i))) for i, (v, o) in items]
            return _WRONG if _WRONG in read else tuple(read)
        if isinstance(value, dict):
            if "name" in value:
                return self._schedule(value, field, key)
            other = next((option for option in options if dataclasses.is_dataclass(option)), None)
            if other is not None:
                section = self.section(other, value, key)  # type: ignore[arg-type]
                return _WRONG if section is None else section
            default = default_of(field)
            inherited = default if isinstance(default, dict) else {}
            return self._schedule({**inherited, **value}, field, key)
        if value is None and type(None) in options:
            return None
        if isinstance(value, str) and str in options:
            return _WRONG if self._schedule({"name": value}, field, key) is _WRONG else value
        return self._plain(value, field, float | dict[str, Any], key)

    def _schedule(self, value: dict[str, Any], field: dataclasses.Field[Any], key: Key) -> Any:
        component, _ = self.component(value, SCHEDULES, key)
        if component is None:
            return _WRONG
        args = {name: item for name, item in component.args.items() if name in value}
        for name in ("start", "end", "warmup_start"):
            self._checked(args.get(name), Any, field, (*key, name))
        return {"name": component.name, **args}

    def unknown_keys(self, values: dict[str, Any], key: Key, *schemas: Schema) -> None:
        """Add a problem for each key that is in none of the schemas."""
        owner = next((f" of {schema.owner}" for schema in reversed(schemas) if schema.owner), "")
        valid = functools.reduce(operator.or_, schemas)
        for name in values:
            if name not in valid.fields:
                inner = (*key, str(name))
                hint = valid.hint(str(name), key)
                self.problem(inner, f"unknown key {dotted(inner)!r}{owner}; {hint}")

    def component(
        self, value: Any, registry: Registry, key: Key, *, ours: Schema | None = None
    ) -> tuple[Component | None, dict[str, Any]]:
        """Return a component and the values of ``ours``, the other fields of the section.

        The component is None if ``value`` is no section, or its name is unknown or missing. Invalid
        arguments and fields are left out.
        """
        if not isinstance(value, dict):
            wanted = f"expected the name of a {registry.kind} or a section with `name`"
            self.problem(key, f"{dotted(key)}={value!r}: {wanted}")
            return None, {}
        ours = ours or Schema.of(None)
        fixed = self.fields(value, ours, key)
        name = value.get("name", MISSING)
        if name == MISSING or not isinstance(name, str):
            self.problem((*key, "name"), f"{dotted(key)} needs the name of a {registry.kind}")
            return None, fixed
        self.note_place((*key, "name"))
        args = {k: v for k, v in value.items() if k != "name" and k not in ours.fields}
        if name not in registry:
            for field in args:
                self.note_place((*key, field))
            if text := guest_problem(registry.kind, name, registry):
                self.problem((*key, "name"), text)
                return None, fixed
            return Component(name=name, args=args), fixed
        schema = schema_of(registry, name)
        self.unknown_keys(args, key, ours, schema)
        return Component(name=name, args=self.fields(args, schema, key)), fixed

    def components(
        self, value: Any, field: dataclasses.Field[Any], schema: Schema, key: Key
    ) -> dict[str, Component]:
        """Return the components of a mapping ``{name: {args}}`` by name; null removes an entry."""
        made = {}
        registry = REGISTRIES[field.metadata["of"]]
        kind = typing.get_args(schema.types[field.name])[1]
        ours = Schema.of(kind, without=["name", "args"]) | schema.shared_by(field)
        for name, entry in self.mapping(value, key).items():
            inner = (*key, str(name))
            self.note_place(inner)
            if entry is None:
                if not self._removes(inner, registry):
                    hint = nearest(str(name), registry.names())
                    self.problem(inner, f"no {registry.kind} named {name!r}; {hint}")
                continue
            named = {"name": name, **entry} if isinstance(entry, dict) else entry
            component, values = self.component(named, registry, inner, ours=ours)
            if component is not None:
                made[str(name)] = kind.joined(component, values)
        return made

    def _removes(self, key: Key, registry: Registry) -> bool:
        """Return whether null is valid at ``key``: its name is known or a layer sets it."""
        name = str(key[-1])
        return (
            name in registry
            or classy_has(registry.kind, name)
            or any(layer.value(key) is not None for layer in self.layers)
        )

    def pipeline(self, value: Any, registry: Registry, key: Key) -> list[Component]:
        """Return the components of a list of names or sections, without invalid ones."""
        if value is None:
            return []
        if not isinstance(value, list):
            self.problem(key, f"{dotted(key)}={value!r}: expected a list of {registry.kind}s")
            return []
        read = []
        for index, item in enumerate(value):
            inner = (*key, str(index))
            entry = {"name": item} if isinstance(item, str) else item
            read.append(self.component(entry, registry, inner)[0])
            if isinstance(item, str):
                self.places[dotted((*inner, "name"))] = self.layers.place(inner) or "default"
        return [component for component in read if component is not None]

    def _nested(self, value: Any, registry: Registry, annotation: Any, key: Key) -> list[Any]:
        """Return a list of components, or a nested list of them, as plain values."""
        (inner,) = typing.get_args(annotation)
        if typing.get_origin(inner) is not list:
            return [component.to_dict() for component in self.pipeline(value, registry, key)]
        if not isinstance(value, list):
            wanted = f"expected a list of lists of {registry.kind}s"
            self.problem(key, f"{dotted(key)}={_shown(value)}: {wanted}")
            return []
        items = enumerate(value)
        return [self._nested(item, registry, inner, (*key, str(index))) for index, item in items]

    def note_place(self, key: Key) -> None:
        """Record the origin of the value at ``key``."""
        self.places[dotted(key)] = self.layers.place(key) or "default"


def _holds(kind: Any) -> bool:
    """Return whether a type is a section or a mapping of sections or components."""
    if typing.get_origin(kind) is dict:
        kind = typing.get_args(kind)[1]
    return dataclasses.is_dataclass(kind)


def _wanted(field: dataclasses.Field[Any], kind: Any) -> str:
    of = field.metadata.get("of")
    return f"a list of {of}" if of else describe(kind)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value).replace("None", "null")
