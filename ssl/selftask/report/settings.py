"""Table of the config of a run; values set by the user or the recipe come first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from selftask.config.explain import are_sections
from selftask.report.page import Section, render
from selftask.report.record import RunRecord


def config_section(record: RunRecord) -> Section:
    """Return the section with the config, empty if the config cannot be read.

    Origins of values are read from ``environment.json``; runs of older versions have none.
    """
    values = dict(flat(record.config))
    origins = record.environment.get("origins")
    origins = origins if isinstance(origins, dict) else {}
    if not values:
        return Section("Config", "", "config")
    placed = {key: _origin(origins, key) for key in values}
    typed = [key for key in values if placed[key].startswith("command line")]
    chosen = [key for key in values if not placed[key].startswith(("auto", "command line"))]
    recipe = [key for key in chosen if placed[key]]
    rest = [key for key in values if key not in {*typed, *recipe}]
    tables = [
        ("Set on the command line", typed, False),
        ("Set by the recipe", recipe, bool(typed)),
        ("Defaults" if origins else "All values", rest, True),
    ]
    rows = [
        (title, [(key, shown(values[key]), placed[key]) for key in keys], folded)
        for title, keys, folded in tables
    ]
    return Section("Config", render("run.settings", rows), "config")


def flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each setting of nested sections.

    In a list of sections, the index is part of the key. Other lists and empty sections are values.
    """
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from flat(value, f"{key}.")
        elif are_sections(value):
            for number, entry in enumerate(value):
                yield from flat(entry, f"{key}.{number}.")
        else:
            yield key, value


def _origin(origins: dict[str, Any], key: str) -> str:
    """Return the origin of a key or of the section around it; empty for a default."""
    while key:
        if key in origins:
            return str(origins[key])
        key = key.rpartition(".")[0]
    return ""


def shown(value: Any) -> str:
    """Format a value as on the command line."""
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
