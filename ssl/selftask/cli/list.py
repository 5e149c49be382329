"""``selftask list``: list all names that a config may use, without importing their modules."""

from __future__ import annotations

import ast
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from selftask.config.compose.provenance import show_path
from selftask.errors import check_known
from selftask.registry import REGISTRIES, Registry
from selftask.registry.class_source import parse

KINDS = ["recipes", *REGISTRIES]
USAGE = f"""\
usage: selftask list [KIND ...] [import=[MODULE]]

Without KIND, prints the names of every kind. With it, prints a line for each name, with its file:
KIND is one of: {", ".join(KINDS)}
import=[MODULE] also lists what your own modules in the current folder register.
Names of Classy Vision's hooks, meters, optimizers and schedules work too, written classy:NAME."""

Row = tuple[str, str, str]  # name, summary, location


def main(argv: list[str]) -> int:
    """Print the names of all kinds, or name, summary and file:line of the given kinds."""
    from selftask.config.compose.overrides import import_plugins

    kinds = import_plugins(argv)
    for kind in kinds:
        check_known(kind, KINDS, f"there is no kind {kind!r}")
    if not kinds:
        print("\n".join(overview(shutil.get_terminal_size((100, 24)).columns)))
        return 0
    for kind in kinds:
        print(f"{kind}:")
        _print_rows(recipe_rows() if kind == "recipes" else name_rows(REGISTRIES[kind]))
    return 0


def overview(width: int) -> list[str]:
    """Return lines with the number of recipes and, wrapped to ``width`` characters, other names."""
    margin = max(map(len, KINDS)) + 2
    number = sum(map(len, recipe_rows().values()))
    lines = [f"{'recipes':<{margin}}{number}: METHOD/digits, METHOD/images, and others"]
    for kind, registry in REGISTRIES.items():
        names = ", ".join(name for rows in name_rows(registry).values() for name, _, _ in rows)
        lines += textwrap.wrap(
            names,
            width,
            initial_indent=f"{kind:<{margin}}",
            subsequent_indent=" " * margin,
            break_on_hyphens=False,
        )
    return [*lines, "", "`selftask list KIND` prints what each does, and its file."]


def name_rows(registry: Registry) -> Mapping[str, list[Row]]:
    """Return the rows of a registry, grouped by the title of their sub-package.

    The title is empty for modules outside of sub-packages.
    """
    groups: dict[str, list[Row]] = {"": []}  # the package itself comes first
    for name in registry:
        address = registry.address(name)
        inside = address.module.removeprefix(f"{registry.package}.")
        in_sub_package = inside != address.module and "." in inside
        title = _title(address.path.parent) if in_sub_package else ""
        location = f"{show_path(address.path)}:{address.line}"
        groups.setdefault(title, []).append((name, registry.summary(name), location))
    return groups


def recipe_rows() -> Mapping[str, list[Row]]:
    """Return the rows of all recipes, in one group.

    The summary is the header up to the first line, from the second on, that ends with a full stop.
    """
    from selftask.config.compose.recipes import available

    rows = []
    for name, recipe in available().items():
        header = recipe.header
        lines = next((n for n in range(2, len(header) + 1) if header[n - 1].endswith(".")), 2)
        rows.append((name, " ".join(header[:lines]), show_path(recipe.path)))
    return {"": rows}


def _title(folder: Path) -> str:
    """Return the first line of a package's docstring, without its full stop."""
    doc = ast.get_docstring(parse(folder / "__init__.py")) or folder.name
    return doc.partition("\n")[0].rstrip(".")


def _print_rows(groups: Mapping[str, Iterable[Row]]) -> None:
    width = max((len(name) for rows in groups.values() for name, _, _ in rows), default=0)
    for title, rows in groups.items():
        if title:
            print(f"\n  {title}")
        for name, summary, location in rows:
            print(f"  {name:<{width}}  {summary}  [{location}]")
