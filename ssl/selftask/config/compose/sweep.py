"""Sweeps from comma lists: ``train.seed=1,2 optimizer.lr=0.1,0.2`` are four runs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from selftask.config.compose.overrides import parse_value, split_override
from selftask.config.keys import is_path
from selftask.errors import ConfigError, UserError
from selftask.files.paths import exists, expand_user

_OUTSIDE_BRACES = re.compile(r",(?![^{}]*\})")  # a comma, except in a pattern such as {a,b}/*.jpg

T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its overrides, and a name for its folder (empty without a sweep)."""

    overrides: list[str]
    name: str


def load_points(points: Iterable[Point], load: Callable[[Point], T]) -> list[T]:
    """Return ``load(point)`` of each run; raise ConfigError with the problems of all runs."""
    loaded: list[T] = []
    problems: dict[str, None] = {}
    for point in points:
        try:
            loaded.append(load(point))
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise ConfigError(problems)
    return loaded


def expand_sweep(overrides: list[str]) -> list[Point]:
    """Return a point for each combination of values in comma lists; one point without lists.

    Invalid overrides are returned unchanged; reading the config reports them.

    Raises:
        ConfigError: If a key cannot be swept over.
    """
    choices = [_choices(text) for text in overrides]
    keys = [key for key, values in choices if len(values) > 1]
    if "out" in keys:
        raise ConfigError(["command line: out= takes one folder; each run of a sweep gets its own"])
    for _, options in choices:
        if repeated := [option for i, option in enumerate(options) if option in options[:i]]:
            raise ConfigError([f"command line: {repeated[0]} is given twice"])
    shared = [key for key in keys if key.startswith("launch.")]
    if shared:
        raise ConfigError([f"command line: {shared[0]}: all runs of a sweep share one value"])
    if len(keys) != len(set(keys)):
        raise ConfigError([f"command line: {keys[0]} is swept over twice"])
    short = {key: key.rpartition(".")[2] for key in keys}
    if len(set(short.values())) < len(short):
        short = {key: key for key in keys}
    points = []
    for values in itertools.product(*(values for _, values in choices)):
        chosen = [
            f"{short[key]}_{_plain(value)}"
            for (key, all_values), value in zip(choices, values, strict=True)
            if len(all_values) > 1
        ]
        points.append(Point(list(values), "_".join(chosen)))
    names = [point.name for point in points]
    if len(set(names)) < len(names):  # the values differ only in characters that `_plain` replaces
        points = [Point(p.overrides, f"{i}_{p.name}") for i, p in enumerate(points)]
    return points


def _choices(text: str) -> tuple[str, list[str]]:
    """Return the key of an override, and one override for each value of its comma list.

    Without a comma list, the only override is the given one.
    """
    key, value = split_override(text)
    name = ".".join(key)
    if value is None or text.startswith("~"):
        return name, [text]
    if is_path(key) and exists(expand_user(value)):  # a path with a comma in its name
        return name, [text]
    try:
        parsed = parse_value(value, key)
    except UserError:
        return name, [text]
    if parsed is None:
        return name, [f"{name}={one}" for one in _OUTSIDE_BRACES.split(value)]
    if not parsed.is_sweep_override() or not parsed.is_choice_sweep():
        return name, [text]
    if name.startswith("launch.slurm."):  # a list for sbatch: partition=a,b
        return name, [f"{name}='{value}'"]
    return name, [f"{name}={one}" for one in parsed.sweep_string_iterator()]


def _plain(override: str) -> str:
    """Return the value of an override in a form that a folder name may contain."""
    return re.sub(r"[^\w.+-]+", "-", override.partition("=")[2]).strip("-")
