"""Load a Config from a recipe and ``key=value`` overrides, or report all problems at once.

There are three steps. ``compose`` builds nested values from files and the command line,
``sections`` converts them to the types of ``schema``, and ``checks`` compares the values with each
other. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from selftask.config.checks import identical_views, locations
from selftask.config.checks.components import component_problems
from selftask.config.checks.contradictions import contradictions
from selftask.config.compose.compose import compose
from selftask.config.schema import Config
from selftask.config.schema_reader import Reader
from selftask.config.sections import read_config
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
            are errors, and its ``out``, ``resume`` and ``init`` are not looked up.
        typed: Words that the user has typed, if ``overrides`` are not.

    Raises:
        ConfigError: If anything is wrong; lists every problem with its ``file:line`` or
            ``command line: ...``.
        UserError: If ``trust`` is False and a file names code. That code is not imported.
    """
    composed = compose(recipe, overrides, trust=trust, typed=typed)
    reader = Reader(composed.layers)
    config = read_config(reader, composed.values)
    # A key whose override is invalid is reported for that, not as missing.
    unreadable = {text.lstrip("+").partition("=")[0] for text in overrides}
    read = [p for p in reader.problems if p.partition(" is missing")[0] not in unreadable]
    if composed.problems or read or config is None:
        raise ConfigError([*composed.problems, *read])
    config.notes.extend(composed.notes)
    found = [*contradictions(config), *component_problems(config, hooks=trust)]
    for key, text in [*found, *(locations.problems(config) if trust else ())]:
        reader.problem(key, text)
    if reader.problems:
        raise ConfigError(reader.problems)
    config.notes.extend(identical_views.notes(config))
    return config


def to_yaml(config: Config) -> str:
    """Return the text of a run's ``config.yaml``; ``load_config`` of it gives an equal Config."""
    text: str = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
    return text
