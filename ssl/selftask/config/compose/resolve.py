"""Resolve ``${...}`` references of merged values, and fill in values that a recipe omits."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import (
    GrammarParseError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from selftask.config.compose.provenance import Layer, Layers
from selftask.config.compose.recipes import is_recipe_file
from selftask.config.compose.short_forms import expand
from selftask.config.keys import dotted
from selftask.config.schema import DEFAULT_HOOKS
from selftask.config.values import auto_values
from selftask.errors import ConfigError

REFERENCE = "if you trust where it comes from, trust=true resolves it"


def resolve(
    values: dict[str, Any], layers: Layers, problems: list[str], *, trust: bool
) -> dict[str, Any]:
    """Return the values with references resolved, and short forms in the result expanded.

    Args:
        values: Merged values.
        layers: Their layers.
        problems: Earlier problems, to report together with an invalid reference.
        trust: Whether to allow OmegaConf's resolvers. With ``${oc.env:NAME}``, a config from
            somebody else could put secrets of this machine into an address. References to other
            keys are always resolved.

    Raises:
        ConfigError: If a reference cannot be resolved.
    """
    if not _has_reference(values):
        return expand(values)
    try:
        with nullcontext() if trust else patch.dict(BaseContainer._resolvers, clear=True):
            resolved = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        key = tuple(str(error.full_key or "").replace("[", ".").replace("]", "").split("."))
        origin = layers.place_or_around(key)
        text = str(error).splitlines()[0]
        if isinstance(error, GrammarParseError):
            text = "no valid reference; one is written ${section.key}"
        if isinstance(error, UnsupportedInterpolationType) and not trust:
            text = f"a reference to something outside of the config is not resolved; {REFERENCE}"
        raise ConfigError([*problems, f"{origin or 'config'}: {dotted(key)}: {text}"]) from error
    return expand(resolved)


def _has_reference(value: Any) -> bool:
    """Return whether a text in a value has a ``${...}`` reference."""
    if isinstance(value, dict):
        return any(map(_has_reference, value.values()))
    if isinstance(value, list):
        return any(map(_has_reference, value))
    return isinstance(value, str) and "${" in value


def complete(values: dict[str, Any], layers: Layers, recipe: str) -> dict[str, Any]:
    """Return the values with recipe, run folder, default hooks and ``data.num_workers`` filled in.

    The origin of a computed number of workers is added to ``layers``.
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
