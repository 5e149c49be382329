"""Table of the config of a run; values set by the user or the recipe come first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from selftask.report.page import Section, escape
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
    parts = [
        _table("Set on the command line", typed, values, placed, folded=False),
        _table("Set by the recipe", recipe, values, placed, folded=bool(typed)),
        _table("Defaults" if origins else "All values", rest, values, placed, folded=True),
    ]
    return Section("Config", "".join(parts), "config")


def flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each setting of nested sections.

    In a list of sections, the index is part of the key. Other lists and empty sections are values.
    """
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from flat(value, f"{key}.")
        elif _are_sections(value):
            for number, entry in enumerate(value):
                yield from flat(entry, f"{key}.{number}.")
        else:
            yield key, value


def _are_sections(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _origin(origins: dict[str, Any], key: str) -> str:
    """Return the origin of a key or of the section around it; empty for a default."""
    while key:
        if key in origins:
            return str(origins[key])
        key = key.rpartition(".")[0]
    return ""


def _table(
    title: str, keys: list[str], values: dict[str, Any], placed: dict[str, str], *, folded: bool
) -> str:
    if not keys:
        return ""
    rows = "".join(
        f"<tr><td class=mono>{escape(key)}</td><td class=mono>{escape(_shown(values[key]))}</td>"
        f"<td class=muted>{escape(placed[key])}</td></tr>"
        for key in keys
    )
    table = f"<table><tbody>{rows}</tbody></table>"
    if folded:
        return f"<details><summary>{escape(title)} ({len(keys)})</summary>{table}</details>"
    return f"<h3>{escape(title)}</h3>{table}"


def _shown(value: Any) -> str:
    """Format a value as on the command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
