"""``selftask list``: all names that a config may use, read from source without imports."""

from __future__ import annotations

import os
from collections.abc import Iterable

from selftask.errors import UserError, nearest
from selftask.registry import REGISTRIES, Registry

KINDS = ["recipes", *REGISTRIES]
USAGE = f"""\
usage: selftask list [KIND ...]

KIND is one of: {", ".join(KINDS)}
Names of Classy Vision's hooks, meters, optimizers and schedules work too, written classy:NAME."""


def main(argv: list[str]) -> int:
    """Print name, summary and file:line of all kinds, or of those asked for."""
    for kind in argv:
        if kind not in KINDS:
            raise UserError(f"there is no kind {kind!r}; {nearest(kind, KINDS)}")
    from selftask.config.extensions import import_entry_points

    import_entry_points()
    for kind in argv or KINDS:
        rows = _recipes() if kind == "recipes" else _names(REGISTRIES[kind])
        print(f"{kind}:")
        _print_rows(rows)
    return 0


def _names(registry: Registry) -> Iterable[tuple[str, str, str]]:
    for name in registry:
        address = registry.address(name)
        yield name, registry.summary(name), f"{_shorter(str(address.path))}:{address.line}"


def _recipes() -> Iterable[tuple[str, str, str]]:
    """Return each recipe with its accuracy: the second line of its header, after the title."""
    from selftask.config.compose.recipes import shipped

    for name, recipe in shipped().items():
        title, promise = [*recipe.header, "", ""][:2]
        yield name, f"{title} {promise}".strip(), _shorter(str(recipe.path))


def _print_rows(rows: Iterable[tuple[str, str, str]]) -> None:
    rows = list(rows)
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, summary, place in rows:
        print(f"  {name:<{width}}  {summary}  [{place}]")


def _shorter(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
