"""Import users' own code: ``import: [mine]`` and the entry points of installed packages."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from selftask.config.extensions.user_code import explain_failure
from selftask.errors import ConfigError, UserError, nearest
from selftask.files.received import TEXTS

GROUP = "selftask"  # entry point group; entries NAME = package.module are imported at start
_LOOKED = "the current folder, the recipe's folder and the installed packages"


def import_extensions(modules: Any, folders: Iterable[Path], origin: str) -> None:
    """Import the user's modules from ``folders`` or Python's search path.

    Args:
        modules: A name of a module, or a list of names.
        folders: Folders to put first on the search path, where they stay.
        origin: Origin of ``import:`` in the config, for messages.

    Raises:
        ConfigError: If ``modules`` is neither, or an import fails, with the line that failed.
    """
    modules = [modules] if isinstance(modules, str) else modules
    if not TEXTS.accepts(modules):
        raise ConfigError([f"{origin}: import={modules!r}: expected a list of module names"])
    for folder in reversed([str(folder) for folder in folders]):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    problems = [problem for name in modules if (problem := _import(name, f"{origin}: import"))]
    if problems:
        raise ConfigError(problems)


def import_listed(values: Mapping[str, Any], folders: Iterable[Path], origin: str | None) -> None:
    """Import the modules of a config's ``import:``, before any name in it is looked up.

    Args:
        values: Merged values, with references.
        folders: Folders to put first on the search path.
        origin: Origin of ``import:``, for messages; None if it is unknown.

    Raises:
        ConfigError: As ``import_extensions``.
    """
    if not values.get("import"):
        return
    try:
        modules = OmegaConf.select(OmegaConf.create(dict(values)), "import")
    except OmegaConfBaseException:  # it cannot be resolved, which is reported later
        return
    names = OmegaConf.to_container(modules) if OmegaConf.is_config(modules) else modules
    if names:
        import_extensions(names, folders, origin or "import")


@cache
def import_entry_points() -> None:
    """Import the entry points of installed packages; raise ConfigError if one fails."""
    points = importlib.metadata.entry_points(group=GROUP)
    problems = [p for e in points if (p := _import(e.module, f"entry point {e.name!r}"))]
    if problems:
        raise ConfigError(problems)


OBJECTS = "selftask.api.objects"  # the module in which configs find objects given in Python


def import_object(address: str, key: str) -> Any:
    """Import and return ``package.module:name``; add the current folder to ``sys.path``.

    Args:
        address: ``package.module:name``.
        key: Config key of the address, for messages.

    Raises:
        UserError: If the import fails, with the line that failed, or if there is no such name.
    """
    module, _, name = address.partition(":")
    if not name:
        raise UserError(f"{key}: {address!r} is no package.module:name")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    if problem := _import(module, key, "the current folder and the installed packages"):
        raise UserError(problem)
    loaded = sys.modules[module]
    if not hasattr(loaded, name):
        if module == OBJECTS:
            raise UserError(
                f"{key}: {name} was an object of another Python session, and only its name was "
                "saved; give it again in Python (a backbone's weights are in export/backbone.pt)"
            )
        names = [word for word in vars(loaded) if not word.startswith("_")]
        raise UserError(f"{key}: {module} has no {name!r}; {nearest(name, names)}")
    return getattr(loaded, name)


def _import(name: str, origin: str, searched: str = _LOOKED) -> str | None:
    """Import a module; return an error message in one line, or None."""
    if not all(word.isidentifier() for word in name.split(".")) or name.endswith(".py"):
        meant = Path(name).name.removesuffix(".py")
        return f"{origin}: {name!r} is not the name of a module; did you mean {meant!r}?"
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):
            return f"{origin}: no module named {name!r} (looked in {searched})"
        return f"{origin}: {name!r} {explain_failure(error)}"
    return None
