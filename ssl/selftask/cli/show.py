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
                    (RUN/config.yaml), and all of a part whose name differs, as a recipe that
                    inherits it"""


def main(argv: list[str]) -> int:
    """Print the config of a recipe with overrides, or its difference from another recipe."""
    words, other = _take_other(argv)
    needs_first(words, "config needs a RECIPE", USAGE)
    from selftask.config.difference import difference
    from selftask.config.explain import explain

    config = _load(words[0], words[1:])
    text = explain(config) if other is None else difference(config, _load(other, []), other)
    print(masked(text))
    return 0


def _take_other(argv: list[str]) -> tuple[list[str], str | None]:
    """Return the words without ``--against OTHER``, and the other recipe if there is one."""
    for index, word in enumerate(argv):
        name, equals, _ = word.partition("=")
        if name == "--against":
            end = index + (1 if equals else 2)
            _, options = take_options(argv[index:end], {name: str})
            return [*argv[:index], *argv[end:]], options[name]
    return argv, None


def _load(recipe: str, overrides: list[str]) -> Config:
    """Return a config; if ``data`` is missing and nothing else is wrong, use ``data=FOLDER``.

    A note about this is printed to stderr.
    """
    from selftask.config.load import load_config

    try:
        return load_config(recipe, overrides)
    except ConfigError as error:
        if [problem.partition(":")[0] for problem in error.problems] != ["data is missing"]:
            raise
        print(f"note: {error}; FOLDER stands for it below", file=sys.stderr)
        return load_config(recipe, [*overrides, "data=FOLDER"])
