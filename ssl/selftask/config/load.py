"""Load a Config from a recipe and ``key=value`` overrides, or report all problems at once.

``load_config`` is a list of steps: find the file, merge it with its bases, apply the overrides,
resolve references, convert values to the types of ``schema``, and compare them with each other.
Does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException, UnsupportedInterpolationType

from selftask.config.checks import identical_views, locations
from selftask.config.checks.components import component_problems
from selftask.config.checks.contradictions import contradictions
from selftask.config.compose import recipes
from selftask.config.compose.bases import compose_recipe
from selftask.config.compose.overrides import (
    apply_overrides,
    import_plugins,
    last_value,
    parse_overrides,
)
from selftask.config.compose.provenance import Layer, Layers
from selftask.config.compose.short_forms import expand
from selftask.config.config_class import config_class
from selftask.config.extensions import import_extensions
from selftask.config.keys import Key, dotted
from selftask.config.schema import DEFAULT_HOOKS, SHARED, Config
from selftask.config.sections import read_config
from selftask.config.trust import REFERENCE, code_in, refuse_code
from selftask.config.values import auto_values
from selftask.errors import ConfigError
from selftask.registry import METHODS

METHOD: Key = ("method",)


def load_config(
    recipe: str, overrides: list[str], *, trust: bool = True, typed: Sequence[str] | None = None
) -> Config:
    """Return the validated config of a method, shipped recipe or yaml file.

    Args:
        recipe: Name of the method or recipe, or path of the file.
        overrides: ``key=value`` arguments that override the recipe.
        trust: False for the config of a run that is read and not trained, which may come from
            somebody else: code that it names is refused, ``${oc.env:NAME}`` and other resolvers
            are errors, and its ``out``, ``resume`` and ``init`` are not looked up.
        typed: Words that the user has typed; None: ``overrides``.

    Raises:
        ConfigError: If anything is wrong; lists every problem with its ``file:line`` or
            ``command line: ...``.
        UserError: If ``trust`` is False and a file names code. That code is not imported.
    """
    typed = list(overrides if typed is None or trust else typed)
    import_plugins(typed)
    parsed, problems = parse_overrides(overrides)  # after the import: short forms may name plug-ins
    try:
        path = recipes.locate(recipe, last_value(parsed, ("data", "name")))
        merged, layers = compose_recipe(path, may_fetch=trust)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from error
    problems += apply_overrides(merged, layers, parsed)
    values = _plain(merged, resolve=False)
    if not trust:
        refuse_code(code_in(values), recipe, typed)
    with nullcontext() if trust else _no_resolvers():
        _import(merged, [Path.cwd(), *([path.parent] if trust else [])], layers)
        notes = _drop_arguments_of_others(values, layers)
        values = _resolve(values, layers, problems)
    if not trust:
        refuse_code(code_in(values), recipe, typed)
    _fill_in(values, layers, recipe)
    config, unreadable = read_config(values, layers)
    # A key whose override is invalid is reported for that, not as missing.
    invalid = {text.lstrip("+").partition("=")[0] for text in overrides}
    problems += [p for p in unreadable if p.partition(" is missing")[0] not in invalid]
    if problems or config is None:
        raise ConfigError(problems)
    _check(config, layers, trust=trust)
    config.notes.extend([*notes, *identical_views.notes(config)])
    return config


def to_yaml(config: Config) -> str:
    """Return the text of a run's ``config.yaml``; ``load_config`` of it gives an equal Config."""
    text: str = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
    return text


def _import(merged: DictConfig, folders: list[Path], layers: Layers) -> None:
    """Import the modules of ``import``, before any name is looked up."""
    try:
        modules = OmegaConf.select(merged, "import")
    except OmegaConfBaseException:  # it cannot be resolved, which is reported later
        return
    names = OmegaConf.to_container(modules) if OmegaConf.is_config(modules) else modules
    place = layers.place(("import",)) or "import"
    if names:
        import_extensions([names] if isinstance(names, str) else names, folders, place)


def _drop_arguments_of_others(values: dict[str, Any], layers: Layers) -> list[str]:
    """Remove the arguments of components whose name a later layer changes.

    Returns:
        A note about the keys of a base's method that its replacement does not have.
    """
    removed = layers.forget_renamed(values, {**SHARED, METHOD: _method_fields(values, layers)})
    without = [f"{key[-1]} ({place})" for key, place in removed.items() if key[:1] == METHOD]
    if not without:
        return []
    name = values["method"]["name"]
    return [f"method.name={name} has no {', '.join(without)}, which the recipe sets: left out"]


def _method_fields(values: dict[str, Any], layers: Layers) -> list[str]:
    """Return the config fields of a method that replaces that of a base, which it keeps."""
    name = values["method"].get("name") if isinstance(values.get("method"), dict) else None
    if not isinstance(name, str) or not layers.is_renamed(METHOD) or name not in METHODS:
        return []
    config = config_class(METHODS, name)
    # another class than a dataclass is reported when the values are read
    return [f.name for f in dataclasses.fields(config)] if dataclasses.is_dataclass(config) else []


def _resolve(values: dict[str, Any], layers: Layers, problems: list[str]) -> dict[str, Any]:
    """Resolve ``${...}`` references; raise ConfigError if one cannot be resolved."""
    try:
        resolved = _plain(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        key = tuple(str(error.full_key or "").replace("[", ".").replace("]", "").split("."))
        place = layers.place_or_around(key)
        text = str(error).splitlines()[0]
        if isinstance(error, UnsupportedInterpolationType) and not BaseContainer._resolvers:
            text = f"a reference to something outside of the config is not resolved; {REFERENCE}"
        raise ConfigError([*problems, f"{place or 'config'}: {dotted(key)}: {text}"]) from error
    return {key: expand(value, (key,)) for key, value in resolved.items()}


def _no_resolvers() -> AbstractContextManager[Any]:
    """Context without OmegaConf's resolvers: ``${oc.env:HOME}`` is an error.

    The text of a received config could otherwise take secrets of this machine into an address.
    References to other keys are still resolved.
    """
    return patch.dict(BaseContainer._resolvers, clear=True)


def _plain(config: DictConfig, *, resolve: bool) -> dict[str, Any]:
    values = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _fill_in(values: dict[str, Any], layers: Layers, recipe: str) -> None:
    """Add the recipe's name, the run folder, the default hooks and ``auto`` values."""
    if values.get("recipe") is None:
        values["recipe"] = recipe
    if values.get("out") is None:
        name = str(values["recipe"])
        is_file = recipes.is_recipe_file(name)
        values["out"] = f"runs/{Path(name).stem if is_file else name.replace('/', '_')}"
    hooks = values.get("hooks")
    if hooks is None or isinstance(hooks, dict):  # a hook set to null is removed later
        values["hooks"] = {**{name: {} for name in DEFAULT_HOOKS}, **(hooks or {})}
    data, launch = values.get("data"), values.get("launch")
    if isinstance(data, dict) and data.get("num_workers", "auto") == "auto":
        processes = launch.get("processes", 1) if isinstance(launch, dict) else 1
        number, origin = auto_values.num_workers(processes if isinstance(processes, int) else 1)
        data["num_workers"] = number
        computed = Layer({})
        computed.record(("data", "num_workers"), number, origin)
        layers.append(computed)


def _check(config: Config, layers: Layers, *, trust: bool) -> None:
    """Raise ConfigError if values contradict each other, or name files that cannot be read."""
    problems = [*contradictions(config), *component_problems(config, hooks=trust)]
    problems += locations.problems(config) if trust else ()
    if problems:
        raise ConfigError([layers.located(key, text) for key, text in problems])
