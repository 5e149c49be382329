"""Completions of a command line. Does not import torch."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterable

from selftask.cli.main import COMMANDS
from selftask.cli.shell.keys import override_candidates
from selftask.cli.shell.paths import path_candidates, run_candidates
from selftask.config.compose.recipes import ENDINGS

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_LIBRARIES = ("timm:", "torchvision:")


def candidates(line: str) -> list[str]:
    """Return the possible completions of the last word of ``line``, as whole words.

    Args:
        line: The command line up to the cursor, beginning with ``selftask``.
    """
    words = _split(line)
    last = words[-1]
    if len(words) <= 2:
        return _matching([*COMMANDS, "help"], last)
    name, before = words[1], words[2:-1]
    if name == "help":
        return _matching(COMMANDS, last) if not before else []
    if name not in COMMANDS:
        return []
    if last.startswith("-"):
        return _matching(_options(name), last)
    takes_keys = "=" in COMMANDS[name][1]
    if "=" in last:
        return override_candidates(last, before) if takes_keys else []
    arguments = _arguments(name, before, last)
    return [*arguments, *(override_candidates(last, before) if takes_keys and before else ())]


def _split(line: str) -> list[str]:
    """Return the words of a line; if the line ends with a blank, the last word is empty.

    A line with an unclosed quote is split at blanks.
    """
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    return [*words, ""] if not words or line[-1:].isspace() else words


def _matching(words: Iterable[str], start: str) -> list[str]:
    return [word for word in words if word.startswith(start)]


def _options(name: str) -> list[str]:
    """Return the long options in the command's usage text, and ``--help``."""
    usage = str(importlib.import_module(COMMANDS[name][0]).USAGE)
    return list(dict.fromkeys([*_OPTION.findall(usage), "--help"]))


def _arguments(name: str, before: list[str], last: str) -> list[str]:
    """Return completions of the next argument, by the command's line in ``selftask --help``."""
    names = [word for word in before if "=" not in word and not word.startswith("-")]
    if name == "list":
        from selftask.cli.list import KINDS

        return _matching(KINDS, last)
    parts = COMMANDS[name][1].translate(str.maketrans("", "", "[],")).split()
    choices = [
        word for part in parts if part[0].islower() and "=" not in part for word in part.split("|")
    ]
    if choices and not names:
        return _matching(choices, last)
    kinds = [part for part in parts if part[0].isupper()]
    index = len(names) - bool(choices)
    repeats = "..." in parts and "key=value" not in parts
    if not kinds or (index >= len(kinds) and not repeats):
        return []
    kind = " ".join(kinds) if name == "data" else kinds[min(index, len(kinds) - 1)]
    return _of_kind(kind, last)


def _of_kind(kind: str, last: str) -> list[str]:
    """Return the names or paths that complete an argument ``RECIPE``, ``RUN_OR_MODEL``, ..."""
    words: list[str] = []
    if "RECIPE" in kind or "METHOD" in kind:
        words += _matching(recipe_names(), last)
        words += path_candidates(last, endings=ENDINGS)
    if "RUN" in kind or "OUT" in kind:
        words += run_candidates(last)
    if "MODEL" in kind:
        words += _matching(_LIBRARIES, last)
    if "SOURCE" in kind or "DIR" in kind:
        words += path_candidates(last, endings=(".txt", ".csv", ".tar", ".npz", ".parquet"))
    return list(dict.fromkeys(words))


def recipe_names() -> list[str]:
    """Return methods with shipped recipes (``simclr``), then the recipes (``simclr/digits``)."""
    from selftask.config.compose.recipes import shipped

    names = list(shipped())
    return [*dict.fromkeys(name.partition("/")[0] for name in names), *names]
