"""From merged values to those that are read.

Drop the arguments of replaced components, resolve ``${...}`` references, and fill in what a recipe
leaves out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException, UnsupportedInterpolationType

from selftask.config.compose.provenance import Layer, Layers, value_at
from selftask.config.compose.recipes import is_recipe_file
from selftask.config.compose.short_forms import expand
from selftask.config.config_class import config_class
from selftask.config.keys import NAMED, NAMED_ENTRIES, SCHEDULED, SOURCES, Key, default_name, dotted
from selftask.config.schema import DEFAULT_HOOKS, SHARED
from selftask.config.values import auto_values
from selftask.errors import ConfigError
from selftask.registry import METHODS

REFERENCE = "if you trust where it comes from, trust=true resolves it"
_METHOD: Key = ("method",)


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
        if section_key == _METHOD:
            keep |= _fields_of_method(section.get("name"))
        for name in [name for name in section if name not in keep]:
            key = (*section_key, name)
            origin = layers.place(key)
            for layer in layers[:renamed]:
                layer.drop(key)
            if not any(layer.holds(key) for layer in layers[renamed:]):
                del section[name]
                removed += [f"{name} ({origin})"] if section_key == _METHOD else []
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


def resolve(
    values: dict[str, Any], layers: Layers, problems: list[str], *, trust: bool
) -> dict[str, Any]:
    """Return the values with references resolved and the short forms in them expanded.

    Args:
        values: Merged values.
        layers: Their layers.
        problems: Earlier problems, which are reported together with a wrong reference.
        trust: Whether to use OmegaConf's resolvers. The text of a received config could take
            secrets of this machine into an address by ``${oc.env:NAME}``. References to other keys
            are resolved in any case.

    Raises:
        ConfigError: If a reference cannot be resolved.
    """
    try:
        with nullcontext() if trust else patch.dict(BaseContainer._resolvers, clear=True):
            resolved = as_dict(OmegaConf.create(values), resolved=True)
    except OmegaConfBaseException as error:
        key = tuple(str(error.full_key or "").replace("[", ".").replace("]", "").split("."))
        place = layers.place_or_around(key)
        text = str(error).splitlines()[0]
        if isinstance(error, UnsupportedInterpolationType) and not trust:
            text = f"a reference to something outside of the config is not resolved; {REFERENCE}"
        raise ConfigError([*problems, f"{place or 'config'}: {dotted(key)}: {text}"]) from error
    return {key: expand(value, (key,)) for key, value in resolved.items()}


def as_dict(config: DictConfig, *, resolved: bool = False) -> dict[str, Any]:
    """Return nested plain values, with or without their references resolved."""
    values = OmegaConf.to_container(config, resolve=resolved)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def complete(values: dict[str, Any], layers: Layers, recipe: str) -> dict[str, Any]:
    """Return the values with the recipe's name, the run folder, default hooks and ``auto`` values.

    The origin of a computed value is added to ``layers``.
    """
    values = dict(values)
    if values.get("recipe") is None:
        values["recipe"] = recipe
    if values.get("out") is None:
        name = str(values["recipe"])
        values["out"] = (
            f"runs/{Path(name).stem if is_recipe_file(name) else name.replace('/', '_')}"
        )
    hooks = values.get("hooks")
    if hooks is None or isinstance(hooks, dict):  # a hook set to null is removed later
        values["hooks"] = {**{name: {} for name in DEFAULT_HOOKS}, **(hooks or {})}
    data, launch = values.get("data"), values.get("launch")
    if isinstance(data, dict) and data.get("num_workers", "auto") == "auto":
        processes = launch.get("processes", 1) if isinstance(launch, dict) else 1
        number, origin = auto_values.num_workers(processes if isinstance(processes, int) else 1)
        values["data"] = {**data, "num_workers": number}
        computed = Layer({})
        computed.record(("data", "num_workers"), number, origin)
        layers.append(computed)
    return values
