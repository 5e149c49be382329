"""Users' own code: ``import: [mine]`` and the entry points of installed packages."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from selftask.config.layers import show_path
from selftask.errors import ConfigError

GROUP = "selftask"  # the entry point group: NAME = package.module, imported before names are used


def import_extensions(modules: Iterable[str], folders: Iterable[Path], place: str) -> None:
    """Import the user's ``modules``, found in ``folders`` or wherever python finds modules.

    Raises ConfigError with the line that failed; ``place`` is where ``import:`` stands.
    """
    for folder in reversed([str(folder) for folder in folders]):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    problems = [problem for name in modules if (problem := _import(name, f"{place}: import"))]
    if problems:
        raise ConfigError(problems)


@cache
def import_entry_points() -> None:
    """Import what installed packages registered under ``selftask``; ConfigError where one fails."""
    found = importlib.metadata.entry_points(group=GROUP)
    problems = [p for e in found if (p := _import(e.module, f"entry point {e.name!r}"))]
    if problems:
        raise ConfigError(problems)


def _import(name: str, place: str) -> str | None:
    """What went wrong importing ``name``, in one line."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            looked = "the current folder, the recipe's folder and the installed packages"
            return f"{place}: no module named {name!r} (looked in {looked})"
        return _failed(name, place, error)
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything
        return _failed(name, place, error)
    return None


def _failed(name: str, place: str, error: Exception) -> str:
    reason = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        where = f"{show_path(Path(error.filename or name))}:{error.lineno}"
        return f"{place}: {name!r} failed at {where}: {type(error).__name__}: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_theirs(f.filename)]
    where = f" at {show_path(Path(frames[-1].filename))}:{frames[-1].lineno}" if frames else ""
    return f"{place}: {name!r} failed{where}: {type(error).__name__}: {reason}"


def _is_theirs(filename: str) -> bool:
    """Whether a line of a traceback is neither python's, nor importlib's, nor ours."""
    ours = str(Path(__file__).resolve().parents[1])
    return not filename.startswith(("<frozen", ours, str(Path(traceback.__file__).parent)))
