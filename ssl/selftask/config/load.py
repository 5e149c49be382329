"""Load a Config from a recipe and ``key=value`` overrides, or report all problems at once.

``load_config`` runs a list of stages, each in its own module: find the file, merge it with its
bases, apply the overrides, drop arguments of replaced components, resolve references, convert
values to the types of ``schema``, and compare them with each other. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from selftask.config.checks.config_problems import config_problems
from selftask.config.checks.views import empty_transforms, identical_views
from selftask.config.compose import recipes
from selftask.config.compose.overrides import (
    apply_overrides,
    import_plugins,
    last_value,
    parse_overrides,
    split_override,
)
from selftask.config.compose.provenance import drop_replaced
from selftask.config.compose.recipe_files import compose_recipe
from selftask.config.compose.resolve import complete, resolve
from selftask.config.extensions.imports import import_listed
from selftask.config.schema import Config
from selftask.config.schema_reader import read_config
from selftask.config.trust import code_in, refuse_code
from selftask.errors import ConfigError


def load_config(
    recipe: str, overrides: list[str], *, trust: bool = True, typed: Sequence[str] | None = None
) -> Config:
    """Return the validated config of a method, shipped recipe or yaml file.

    Args:
        recipe: Name of the method or recipe, or path of the file.
        overrides: ``key=value`` arguments that override the recipe.
        trust: False for the config of a run that is read and not trained, which may come from
            somebody else: code that it names is refused, ``${oc.env:NAME}`` and other resolvers
            are errors, bases are not downloaded, and its ``out``, ``resume`` and ``init`` are not
            looked up.
        typed: Arguments that the user typed, which may name code although ``trust`` is False.
            None: ``overrides``.

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
        values, layers = compose_recipe(path, may_fetch=trust)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from error
    problems += apply_overrides(values, layers, parsed)
    if trust:  # otherwise only modules are allowed that the user has typed
        import_listed(values, [Path.cwd(), path.parent], layers.place(("import",)))
    notes = drop_replaced(values, layers)
    values = resolve(values, layers, problems, trust=trust)
    values = complete(values, layers, recipe)
    if not trust:
        refuse_code(code_in(values), recipe, typed)
    # A key whose override is invalid is reported for that, not as missing.
    invalid = {key for key, _ in map(split_override, overrides) if layers.place(key) is None}
    config, unreadable = read_config(values, layers, invalid)
    problems += unreadable
    if problems or config is None:
        raise ConfigError(problems)
    if conflicts := config_problems(config, is_trained=trust):
        raise ConfigError([layers.located(key, text) for key, text in conflicts])
    config.notes.extend([*notes, *identical_views(config), *empty_transforms(config)])
    return config


def to_yaml(config: Config) -> str:
    """Return the text of a run's ``config.yaml``; ``load_config`` of it gives an equal Config."""
    return yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
