"""``selftask config``: print the resolved config with the origin of each value."""

from __future__ import annotations

import sys

from selftask.cli.options import needs_first, take_options
from selftask.config.schema import Config
from selftask.errors import ConfigError, masked

USAGE = """\
usage: selftask config RECIPE [key=value ...] [--against OTHER]

Prints the whole config as yaml, each value with its origin: file:line, command line or default.
Passwords in addresses are masked.
The output is itself a recipe: selftask config simclr > mine.yaml; selftask train mine.yaml

  --against OTHER   print only the values that differ from those of another recipe, or of a run
                    (RUN/config.yaml), as a recipe that inherits it"""


def main(argv: list[str]) -> int:
    """Print the config of a recipe with overrides, or its difference from another recipe."""
    words, options = take_options(argv, {"--against": str})
    needs_first(words, "config needs a RECIPE", USAGE)
    from selftask.config.difference import difference
    from selftask.config.explain import explain

    config, other = _load(words[0], words[1:]), options.get("--against")
    text = explain(config) if other is None else difference(config, _load(other, []), other)
    print(masked(text))
    return 0


def _load(recipe: str, overrides: list[str]) -> Config:
    """Return a config; if ``data`` is missing, print a note and use ``data=FOLDER``."""
    from selftask.config.load import load_config

    try:
        return load_config(recipe, overrides)
    except ConfigError as error:
        if [problem.partition(":")[0] for problem in error.problems] != ["data is missing"]:
            raise
        print(f"note: {error}; FOLDER stands for it below", file=sys.stderr)
        return load_config(recipe, [*overrides, "data=FOLDER"])
