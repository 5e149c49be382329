"""Names for data sets: ``data=imagenet`` stands for a section of a ``catalog.yaml``.

The catalog is the file ``$SELFTASK_CATALOG`` if that is set. Otherwise it is
``~/.config/selftask/catalog.yaml`` together with ``catalog.yaml`` in the current folder, whose
entries take precedence. ``$SELFTASK_DATA_IMAGENET`` replaces the path of one entry, so that a
recipe with names runs unchanged on another machine.
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from selftask.errors import UserError
from selftask.files.paths import expand_user, is_file
from selftask.registry import SOURCES

_NAME = re.compile(r"[A-Za-z][\w-]*")
_PLACES = ("path", "pattern", "root")  # fields with the location of the data, by kind of source


def look_up(name: str) -> dict[str, Any] | str | None:
    """Return the entry of a name: a ``data:`` section or another short form; None without one.

    Raises:
        UserError: If the catalog is invalid, or if the name resembles an entry and no file has it.
    """
    if not _NAME.fullmatch(name):
        return None
    entries = read_catalog()
    moved = os.environ.get(variable(name))
    entry, place = entries.get(name, (None, ""))
    if entry is None:
        if moved is None:
            _hint(name, list(entries))
        return moved
    if moved is None:
        return entry
    if isinstance(entry, str):
        return moved
    field = next((field for field in _PLACES if field in entry), None)
    if field is None:
        raise UserError(f"{variable(name)}: {name} in {place} has no path to replace")
    return {**entry, field: moved}


def variable(name: str) -> str:
    """Return the environment variable of an entry: ``SELFTASK_DATA_CUB_200`` for ``cub-200``."""
    return "SELFTASK_DATA_" + re.sub(r"\W", "_", name).upper()


def read_catalog() -> dict[str, tuple[dict[str, Any] | str, str]]:
    """Return name -> (entry, its file) for the entries of all catalogs."""
    entries: dict[str, tuple[dict[str, Any] | str, str]] = {}
    for path in _files():
        for name, entry in _read(path).items():
            if isinstance(entry, dict):
                entry = {str(key): value for key, value in entry.items()}
            entries[str(name)] = (entry, str(path))
    return entries


def _files() -> list[Path]:
    given = os.environ.get("SELFTASK_CATALOG")
    if given:
        path = expand_user(given)
        if not is_file(path):
            raise UserError(f"SELFTASK_CATALOG: there is no file {path}")
        return [path]
    home = expand_user(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    usual = [home / "selftask" / "catalog.yaml", Path("catalog.yaml")]
    return [path for path in usual if is_file(path)]


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the catalog {path} cannot be read: {reason}") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UserError(f"the catalog {path}: `name: folder` or `name: section` is expected")
    for name, entry in values.items():
        if not _NAME.fullmatch(str(name)) or str(name) in SOURCES:
            what = "is a source's" if str(name) in SOURCES else "is not a valid name"
            raise UserError(
                f"the catalog {path}: {name!r} {what}; letters, digits, _ and - make a name"
            )
        if not isinstance(entry, str) and not (isinstance(entry, dict) and entry):
            raise UserError(
                f"the catalog {path}: {name} is {entry!r}; a path or a section is expected"
            )
    return values


def _hint(name: str, known: list[str]) -> None:
    close = get_close_matches(name, known, n=1, cutoff=0.75)
    if close and not os.path.exists(name):
        raise UserError(
            f"data={name}: neither a folder nor in the catalog; did you mean {close[0]!r}? "
            f"(./{name} is a folder that is made later)"
        )
