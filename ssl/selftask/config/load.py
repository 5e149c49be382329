"""A recipe and ``key=value``s into a Config, or everything that is wrong with them at once.

Parse the command line, find the recipe, compose (Hydra), import the user's modules, merge the
command line, read each section by its schema, look for contradictions. Nothing here imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from selftask.config.checks.components import component_problems
from selftask.config.checks.contradictions import contradictions
from selftask.config.compose import recipes
from selftask.config.compose.compose import compose_recipe
from selftask.config.compose.overrides import Override, apply_overrides, parse_overrides
from selftask.config.compose.provenance import Layers
from selftask.config.compose.short_forms import expand
from selftask.config.extensions import import_entry_points, import_extensions
from selftask.config.keys import Key
from selftask.config.schema import Config
from selftask.config.schema_reader import Reader
from selftask.config.sections import OURS, read_config
from selftask.config.trust import code_in, refuse_code
from selftask.errors import ConfigError


def load_config(recipe: str, overrides: list[str], *, trust: bool = True) -> Config:
    """The validated config of a method, shipped recipe or yaml file with ``key=value`` on top.

    Raises ConfigError with every problem, each at its ``file:line`` or ``command line: ...``.
    Without ``trust``, raises UserError before it imports anything that only a file names.
    """
    import_plugins(overrides)
    parsed, problems = parse_overrides(overrides)  # short forms may name what was registered now
    try:
        path = recipes.locate(recipe, _source_name(parsed))
        merged, layers = compose_recipe(path, recipes.folder())
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from error
    problems += apply_overrides(merged, layers, parsed)
    values = _plain(merged, resolve=False)
    layers.forget_renamed(values, OURS)
    values = _resolve(values, layers, problems)
    if not trust:
        refuse_code(code_in(values), recipe, overrides)
    folders = [Path.cwd(), path.parent] if trust else [Path.cwd()]
    _import(values.get("import"), folders, layers.place(("import",)) or "import")

    reader = Reader(layers)
    config = read_config(reader, values, recipe)
    given = {text.lstrip("+").partition("=")[0] for text in overrides}  # not missing but unreadable
    problems += [text for text in reader.problems if text.partition(" is missing")[0] not in given]
    if problems or config is None:
        raise ConfigError(problems)
    for key, text in [*contradictions(config), *component_problems(config)]:
        reader.problem(key, text)
    if reader.problems:
        raise ConfigError(reader.problems)
    return config


def import_plugins(overrides: list[str]) -> None:
    """Import what installed packages have registered, and the command line's ``import=``.

    Raises ConfigError with the line that failed.
    """
    import_entry_points()
    imports, _ = parse_overrides(
        [text for text in overrides if text.lstrip("+").startswith("import=")]
    )
    _import(_given(imports, ("import",)), [Path.cwd()], "command line")


def to_yaml(config: Config) -> str:
    """What ``config.yaml`` of a run holds; ``load_config`` of that file gives an equal Config."""
    text: str = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
    return text


def _import(modules: Any, folders: list[Path], place: str) -> None:
    """Import the user's modules before any name is looked up."""
    if not modules:
        return
    names = [modules] if isinstance(modules, str) else modules
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError([f"{place}: import={modules!r}: expected a list of module names"])
    import_extensions(names, folders, place)


def _given(overrides: list[Override], key: Key) -> Any:
    """The value the command line gives for ``key``."""
    return next((o.value for o in reversed(overrides) if o.key == key and not o.delete), None)


def _source_name(overrides: list[Override]) -> str | None:
    data = _given(overrides, ("data",))
    name = data.get("name") if isinstance(data, dict) else _given(overrides, ("data", "name"))
    return name if isinstance(name, str) else None


def _resolve(values: dict[str, Any], layers: Layers, problems: list[str]) -> dict[str, Any]:
    """Follow ``${...}``; a reference to nothing is a problem that ends the reading."""
    try:
        resolved = _plain(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        key = tuple(str(error.full_key or "").replace("[", ".").replace("]", "").split("."))
        place = layers.place_or_around(key)
        text = str(error).splitlines()[0]
        raise ConfigError([*problems, f"{place or 'config'}: {'.'.join(key)}: {text}"]) from error
    return {key: expand(value, (key,)) for key, value in resolved.items()}


def _plain(config: DictConfig, *, resolve: bool) -> dict[str, Any]:
    values = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
