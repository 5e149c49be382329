"""First step of reading a config: compose a recipe and ``key=value`` arguments into nested values.

Expands short forms, resolves references, and fills in the default hooks and values that depend on
the machine. ``layers`` has the origin of each value. Types are checked in a later step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException, UnsupportedInterpolationType

from selftask.config.compose import recipes
from selftask.config.compose.bases import compose_recipe
from selftask.config.compose.endings import is_recipe_file
from selftask.config.compose.overrides import Override, apply_overrides, parse_overrides
from selftask.config.compose.provenance import Layer, Layers
from selftask.config.compose.short_forms import expand
from selftask.config.config_class import config_class
from selftask.config.extensions import import_entry_points, import_extensions
from selftask.config.keys import Key, dotted
from selftask.config.schema import DEFAULT_HOOKS, SHARED
from selftask.config.trust import REFERENCE, code_in, refuse_code
from selftask.config.values import auto_values
from selftask.errors import ConfigError
from selftask.registry import METHODS

METHOD: Key = ("method",)


@dataclass(frozen=True)
class Composition:
    """Nested values, the layers they come from, and the problems found so far."""

    values: dict[str, Any]
    layers: Layers
    problems: list[str]
    notes: list[str]
    """What the user should know, for ``selftask config`` and the table at the start of a run."""


def compose(
    recipe: str, overrides: list[str], *, trust: bool = True, typed: Sequence[str] | None = None
) -> Composition:
    """Compose a method, shipped recipe or recipe file with ``key=value`` overrides.

    Users' modules are imported before the names that they register are looked up.

    Args:
        recipe: As in ``load_config``.
        overrides: As in ``load_config``.
        trust: As in ``load_config``.
        typed: As in ``load_config``.

    Raises:
        ConfigError: If nothing can be composed (no such recipe, invalid yaml, a failing import).
        UserError: If ``trust`` is False and a file names code. That code is not imported.
    """
    typed = list(overrides if typed is None or trust else typed)
    import_plugins(typed)
    parsed, problems = parse_overrides(overrides)  # after the import: short forms may name plug-ins
    try:
        path = recipes.locate(recipe, _source_name(parsed))
        merged, layers = compose_recipe(path, recipes.folder(), may_fetch=trust)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from error
    problems += apply_overrides(merged, layers, parsed)
    values = _plain(merged, resolve=False)
    if not trust:
        refuse_code(code_in(values), recipe, typed)
    folders = [Path.cwd(), path.parent] if trust else [Path.cwd()]
    with nullcontext() if trust else _no_resolvers():
        _import(_modules(merged), folders, layers.place(("import",)) or "import")
        removed = layers.forget_renamed(values, {**SHARED, METHOD: _method_fields(values, layers)})
        values = _resolve(values, layers, problems)
    if not trust:
        refuse_code(code_in(values), recipe, typed)
    _fill_in(values, layers, recipe)
    return Composition(values, layers, problems, list(_notes(values, removed)))


def import_plugins(overrides: list[str]) -> None:
    """Import the plug-ins of installed packages and the modules of ``import=``.

    Raises:
        ConfigError: If an import fails, with the line that failed.
    """
    import_entry_points()
    imports, _ = parse_overrides([t for t in overrides if t.lstrip("+").startswith("import=")])
    _import(_given(imports, ("import",)), [Path.cwd()], "command line")


def _import(modules: Any, folders: list[Path], place: str) -> None:
    """Import the user's modules before any name is looked up."""
    if not modules:
        return
    names = [modules] if isinstance(modules, str) else modules
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError([f"{place}: import={modules!r}: expected a list of module names"])
    import_extensions(names, folders, place)


def _modules(merged: DictConfig) -> Any:
    """Return the value of ``import``, or None if it cannot be resolved, as is reported later."""
    try:
        modules = OmegaConf.select(merged, "import")
    except OmegaConfBaseException:
        return None
    return OmegaConf.to_container(modules) if OmegaConf.is_config(modules) else modules


def _method_fields(values: dict[str, Any], layers: Layers) -> list[str]:
    """Return the config fields of a method that replaces that of a base, which it keeps."""
    name = values["method"].get("name") if isinstance(values.get("method"), dict) else None
    if not isinstance(name, str) or not layers.is_renamed(METHOD) or name not in METHODS:
        return []
    config = config_class(METHODS, name)
    # another class than a dataclass is reported when the values are read
    return (
        [field.name for field in dataclasses.fields(config)]
        if dataclasses.is_dataclass(config)
        else []
    )


def _notes(values: dict[str, Any], removed: dict[Key, str]) -> Iterator[str]:
    """Yield a note about the keys of a base's method that another method does not have."""
    without = [f"{key[-1]} ({place})" for key, place in removed.items() if key[:1] == METHOD]
    if without:
        name = values["method"]["name"]
        yield f"method.name={name} has no {', '.join(without)}, which the recipe sets: left out"


def _given(overrides: list[Override], key: Key) -> Any:
    """Return the value that the command line gives for ``key``."""
    return next((o.value for o in reversed(overrides) if o.key == key and not o.delete), None)


def _source_name(overrides: list[Override]) -> str | None:
    data = _given(overrides, ("data",))
    name = data.get("name") if isinstance(data, dict) else _given(overrides, ("data", "name"))
    return name if isinstance(name, str) else None


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
        values["out"] = _default_out(str(values["recipe"]))
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


def _default_out(recipe: str) -> str:
    """Return the default run folder: ``runs/simclr_digits`` for ``simclr/digits``.

    For a recipe file it has the name of the file.
    """
    path = Path(recipe)
    name = path.stem if is_recipe_file(recipe) else recipe.replace("/", "_")
    return f"runs/{name}"
