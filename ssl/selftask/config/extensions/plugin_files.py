"""Files of the user's own modules that a config names or imports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from selftask.config.extensions.imports import import_object
from selftask.config.schema import Config
from selftask.config.trust import code_in

_OURS = Path(__file__).resolve().parents[1]
_INSTALLED = ("site-packages", "dist-packages")  # environment.json has their versions


def plugin_files(config: Config) -> dict[str, Path]:
    """Return the files of the modules named in a config, and of imported modules next to them.

    Returns:
        Path relative to the folder of the module, with ``/`` separators -> absolute path.

    Raises:
        UserError: If an address in the config cannot be imported.
    """
    named = set(config.imports)
    for key, address in code_in(config.to_dict()):
        if key != ("import",):
            import_object(address, ".".join(key))
            named.add(address.partition(":")[0])
    return dict(_files_of({name.partition(".")[0] for name in named}))


def _files_of(tops: set[str]) -> Iterator[tuple[str, Path]]:
    """Yield relative and absolute path of loaded files next to or below top-level modules."""
    roots = {folder for name in tops if (folder := _folder_of(name)) is not None}
    if not roots:
        return  # resolving the paths of thousands of loaded modules is slow
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "")
        file = path.resolve()
        if path.is_absolute() and file.suffix == ".py" and not file.is_relative_to(_OURS):
            for root in roots:
                if file.is_relative_to(root) and not {*file.parts} & {*_INSTALLED}:
                    yield file.relative_to(root).as_posix(), file


def _folder_of(name: str) -> Path | None:
    """Return the folder that contains a top-level module or package, or None for a built-in."""
    module = sys.modules.get(name)
    paths = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    first = next((Path(path).resolve() for path in paths if path), None)
    if first is None:
        return None
    return first.parent.parent if first.name == "__init__.py" else first.parent
