"""``selftask config``: print the resolved config with the origin of each value."""

from __future__ import annotations

import sys

from selftask.errors import ConfigError, UserError, masked

USAGE = """\
usage: selftask config RECIPE [key=value ...]

Prints the whole config as yaml, each value with its origin: file:line, command line or default.
Passwords in addresses are masked.
The output is itself a recipe: selftask config simclr > mine.yaml; selftask train mine.yaml"""


def main(argv: list[str]) -> int:
    """Print the config of a recipe with overrides, and the origin of each value."""
    if not argv or "=" in argv[0]:
        raise UserError(f"config needs a RECIPE before any key=value\n{USAGE}")
    from selftask.config.explain import explain
    from selftask.config.load import load_config

    try:
        config = load_config(argv[0], argv[1:])
    except ConfigError as error:
        if [problem.partition(":")[0] for problem in error.problems] != ["data is missing"]:
            raise
        print(f"note: {error}; FOLDER stands for it below", file=sys.stderr)
        config = load_config(argv[0], [*argv[1:], "data=FOLDER"])
    print(masked(explain(config)))
    return 0
