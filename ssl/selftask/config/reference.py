"""Describe every config key: type, default, limits and text, read from the config classes.

Used by ``selftask explain`` and the documentation. Does not import torch.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from selftask.config.config_class import config_class
from selftask.config.field_docs import field_docs
from selftask.config.fields import default_of, has_default
from selftask.config.schema import Component, Config
from selftask.config.schema_reader import Shorthand
from selftask.config.values.coerce import LIMITS, describe
from selftask.errors import UserError
from selftask.registry import REGISTRIES, Address
from selftask.registry.class_source import parse

PLACES = {
    "methods": "method.",
    "train_steps": "train.step.",
    "hooks": "hooks.{name}.",
    "backbones": "backbone.",
    "head_blocks": "",  # an item of method.head or method.heads.NAME
    "sources": "data.",
    "samplers": "data.sampler.",
    "tokenizers": "data.tokenizer.",
    "transforms": "",  # an item of views.*.transforms
    "optimizers": "optimizer.",
    "schedules": "",  # a value of optimizer.lr, optimizer.schedule, a momentum, ...
    "meters": "meters.{name}.",
    "evaluations": "eval.evaluations.{name}.",
}
"""Prefix of a component's keys in a config, by kind of component."""

REQUIRED, FROM_RECIPE = NO_DEFAULT = ("required", "set by the recipe")
_UNITS = "pixels|seconds|bytes|MiB|images|samples|keys|patches|degrees|epochs|steps"
_COUNTED = "Images|Samples|Steps|Epochs|Rows|Blocks|Channels|Tokens|Processes|Threads|Evaluations"


@dataclass(frozen=True)
class KeyEntry:
    """Description of one key of a config, as text."""

    key: str
    type: str
    default: str  # empty for a section; may be one of NO_DEFAULT
    limits: str
    text: str
    also: tuple[str, ...]  # names in other frameworks
    owner: str = ""  # name of the component that has the key

    @property
    def unit(self) -> str:
        """Unit of the value, by its type or description (``... in seconds``); empty if unknown."""
        if "duration" in self.type:
            return "steps, epochs or %"
        match = re.search(rf"\bin (?:optimizer )?({_UNITS})\b", self.text)
        if match:
            return match[1]
        counted = re.match(rf"({_COUNTED})\b", self.text)
        is_number = "number" in self.type and "true" not in self.type
        return counted[1].lower() if counted and is_number else ""


@dataclass(frozen=True)
class NamedEntry:
    """Description of a method, hook, transform, ... with its keys."""

    kind: str
    name: str
    text: str  # whole docstring
    address: Address
    keys: tuple[KeyEntry, ...]


def config_keys() -> list[KeyEntry]:
    """Return every key of a config except those of components, in the order of the sections."""
    hidden = ("recipe", "places", "notes", "imports")
    entries = [
        replace(key, default=FROM_RECIPE) if "." not in key.key and key.default == REQUIRED else key
        for key in _keys_of(Config, "", without=hidden)
    ]
    text = field_docs(Config)["imports"]
    return [
        KeyEntry("import", "a list, each text", "[]", "", text, ()),
        *_keys_of(Shorthand, ""),
        *entries,
    ]


def named(kind: str, name: str) -> NamedEntry:
    """Return the description of a registered name; ``kind`` is plural, as in ``selftask list``.

    Raises UserError if there is no such name.
    """
    registry = REGISTRIES[kind]
    address = registry.address(name)
    config = config_class(registry, name)
    prefix = PLACES.get(kind, "").format(name=name)
    keys = [replace(key, owner=name) for key in _keys_of(config, prefix)] if config else []
    try:
        doc = ast.get_docstring(registry.definition(name))
    except UserError:  # registered by a call
        doc = None
    text = doc or ast.get_docstring(parse(address.path)) or registry.summary(name)
    return NamedEntry(kind, name, text, address, tuple(keys))


def all_named() -> Iterator[NamedEntry]:
    """Yield the description of every registered name."""
    for kind, registry in REGISTRIES.items():
        for name in registry.names():
            yield named(kind, name)


def _keys_of(config: type, prefix: str, without: tuple[str, ...] = ()) -> Iterator[KeyEntry]:
    """Yield the keys of a config class and of its sections."""
    docs, hints = field_docs(config), typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if field.name in without or (field.name == "args" and "name" in hints):
            continue  # args: in a config, the component's own keys
        if field.name == "name" and issubclass(config, Component):
            continue  # the key of the component itself
        key, kind = f"{prefix}{field.name}", hints[field.name]
        if field.metadata.get("flat"):
            key = f"{prefix}name"
        yield _entry(key, field, kind, docs.get(field.name, ""))
        for inner, path in _sections(kind, key):
            yield from _keys_of(inner, f"{path}.")


def _entry(key: str, field: dataclasses.Field[Any], kind: Any, text: str) -> KeyEntry:
    if _is_section(kind):
        default = ""
    elif field.metadata.get("auto"):
        default = "auto"
    else:
        default = _show(default_of(field)) if has_default(field) else REQUIRED
    limits = [
        f"{words} {field.metadata[name]:g}"
        for name, (words, _) in LIMITS.items()
        if name in field.metadata and not field.metadata.get("duration")
    ]
    limits += ["one or more"] if field.metadata.get("nonempty") else []
    also = tuple(field.metadata.get("also", ()))
    return KeyEntry(key, _type(field, kind), default, ", ".join(limits), text, also)


def _type(field: dataclasses.Field[Any], kind: Any) -> str:
    """Return the type of a field in words."""
    kinds, origin = field.metadata.get("of"), typing.get_origin(kind)
    optional = " or null" if type(None) in typing.get_args(kind) else ""
    noun = REGISTRIES[kinds].kind.replace("_", " ") if kinds else ""
    if kinds == "schedules" and origin is not list and str not in typing.get_args(kind):
        return f"a number or a schedule{optional}"
    if kinds is not None:
        if origin is dict:
            is_list = typing.get_origin(typing.get_args(kind)[1]) is list
            return f"{'lists of ' if is_list else ''}{noun}s by name"
        if origin is list:
            return f"a list of {noun}s"
        article = "an" if noun[0] in "aeiou" else "a"
        return f"name of {article} {noun}, or a section with it{optional}"
    if field.metadata.get("duration"):
        forms = "a duration (500 steps, 10 epochs, 5%)"
        options = typing.get_args(kind)
        forms += ", or true" if bool in options else ""
        by_time = any(typing.get_origin(option) is dict for option in options)
        forms += ", or durations by time" if by_time else ""
        return f"{forms}{optional}"
    return describe(kind, _show) + (" or auto" if field.metadata.get("auto") else "")


def _sections(kind: Any, key: str) -> Iterator[tuple[type, str]]:
    """Yield the config classes in the type of a field, each with the prefix of its keys."""
    if _is_section(kind) or (isinstance(kind, type) and issubclass(kind, Component)):
        yield kind, key  # for a component, the fields that all components of its kind have
        return
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    names = {dict: f"{key}.NAME", list: f"{key}[]"}
    for option in inner:
        if _is_section(option):
            yield option, names.get(origin, key)  # type: ignore[arg-type]


def _is_section(kind: Any) -> bool:
    of_name = isinstance(kind, type) and issubclass(kind, Component)
    return dataclasses.is_dataclass(kind) and isinstance(kind, type) and not of_name


def _show(value: Any) -> str:
    """Return a default as it is written in yaml."""
    if isinstance(value, Component):
        return value.name
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_show(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_show, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}" if 1e-4 <= abs(value) < 1e6 or not value else repr(value)
    return value if isinstance(value, str) else json.dumps(value)
