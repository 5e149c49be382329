"""Import users' own code: ``import: [mine]`` and the entry points of installed packages."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from selftask.config.compose.provenance import show_path
from selftask.errors import ConfigError, UserError, nearest
from selftask.files.received import TEXTS

GROUP = "selftask"  # entry point group; entries NAME = package.module are imported at start
_LOOKED = "the current folder, the recipe's folder and the installed packages"


def import_extensions(modules: Any, folders: Iterable[Path], origin: str) -> None:
    """Import the user's modules from ``folders`` or Python's search path.

    Args:
        modules: A name of a module, or a list of names.
        folders: Folders to put first on the search path.
        origin: Origin of ``import:`` in the config, for messages.

    Raises:
        ConfigError: If an import fails, with the line that failed.
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


def import_listed(config: DictConfig, folders: Iterable[Path], origin: str | None) -> None:
    """Import the modules of a config's ``import:``, before any name in it is looked up.

    Args:
        config: Merged values, with references.
        folders: Folders to put first on the search path.
        origin: Origin of ``import:``, for messages.
    """
    try:
        modules = OmegaConf.select(config, "import")
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


def import_object(address: str, key: str) -> Any:
    """Import and return ``package.module:name``, which may be in the current folder.

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


def explain_failure(error: Exception) -> str:
    """Format an error as ``failed at mine.py:7: KeyError: 'x'``.

    The line is the last one of the traceback in the user's own code.
    """
    reason = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        where = f" at {show_path(Path(error.filename))}:{error.lineno}" if error.filename else ""
        return f"failed{where}: {type(error).__name__}: {error.msg}"
    frames = user_frames(error)
    where = f" at {place_of(frames[-1])}" if frames else ""
    return f"failed{where}: {type(error).__name__}: {reason}"


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the traceback entries in the user's own code, not in selftask or a library."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if is_users(frame.filename)]


def is_users(filename: str) -> bool:
    """Return whether a file in a traceback is the user's own code, not selftask or a library."""
    ours, standard = Path(__file__).resolve().parents[1], Path(traceback.__file__).parent
    others = (str(ours), str(standard), "site-packages", "dist-packages", "<")
    return not any(part in filename for part in others)


def place_of(frame: traceback.FrameSummary) -> str:
    """Return ``mine.py:7``."""
    return f"{show_path(Path(frame.filename))}:{frame.lineno}"


def calling_place() -> str:
    """Return ``mine.py:7``, the innermost running line of the user's own code, or ``run``."""
    frames = [frame for frame in traceback.extract_stack() if is_users(frame.filename)]
    return place_of(frames[-1]) if frames else "run"


@contextmanager
def module_initialized(call: str) -> Iterator[None]:
    """Context that explains torch's error about an assignment before ``Module.__init__``.

    Args:
        call: The call that must come first.
    """
    try:
        yield
    except AttributeError as error:
        frames = user_frames(error)
        if "before Module.__init__() call" not in str(error) or not frames:
            raise
        raise UserError(f"{place_of(frames[-1])}: call {call} first: {error}") from error


def source_of(entry: Any) -> str:
    """Return ``mine.py:7``, the definition of a function, class or object, or else its name."""
    entry = inspect.unwrap(getattr(entry, "__func__", entry))
    if not (inspect.isfunction(entry) or inspect.isclass(entry)):
        entry = type(entry)
    try:
        file, (_, line) = inspect.getsourcefile(entry), inspect.getsourcelines(entry)
    except (OSError, TypeError):  # made in a shell, or of C code
        file = None
    return f"{show_path(Path(file))}:{line}" if file else str(entry.__qualname__)


def check_takes(function: Callable[..., Any], arguments: Sequence[str], subject: str) -> None:
    """Raise UserError if a user's function cannot be called with these positional arguments.

    Args:
        function: The function or method.
        arguments: Names of the arguments, for the message.
        subject: What the function is, for the message.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C code, which has no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        raise UserError(
            f"{source_of(function)}: {subject} is called with ({', '.join(arguments)}), and takes "
            f"{signature}"
        ) from None
