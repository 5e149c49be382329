"""Copy the user's own modules to the run folder, for reproducibility."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from selftask.config.extensions import import_object
from selftask.config.schema import Config
from selftask.config.trust import code_in
from selftask.logs import get_logger

log = get_logger(__name__)

_OURS = Path(__file__).resolve().parents[1]
_INSTALLED = ("site-packages", "dist-packages")  # not copied; environment.json has the versions


def copy_plugins(config: Config, out: Path) -> None:
    """Copy the modules named in a config, and imported modules next to them, to ``out/code``.

    Args:
        config: The config of the run.
        out: The run folder.

    Raises:
        UserError: If an address in the config cannot be imported.
    """
    named = set(config.imports)
    for key, address in code_in(config.to_dict()):
        if key != ("import",):
            import_object(address, ".".join(key))
            named.add(address.partition(":")[0])
    files = dict(_files_of({name.partition(".")[0] for name in named}))
    for file, inside in files.items():
        target = out / "code" / inside
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        except OSError as error:
            log.warning("%s is not copied into the run: %s", file, error)


def _files_of(tops: set[str]) -> Iterator[tuple[Path, Path]]:
    """Yield loaded files next to or below top-level modules, with their path in ``code/``."""
    roots = {folder for name in tops if (folder := _folder_of(name)) is not None}
    if not roots:
        return  # resolving the paths of thousands of loaded modules is slow
    for module in list(sys.modules.values()):
        place = Path(getattr(module, "__file__", None) or "")
        file = place.resolve()
        if place.is_absolute() and file.suffix == ".py" and not file.is_relative_to(_OURS):
            for root in roots:
                if file.is_relative_to(root) and not {*file.parts} & {*_INSTALLED}:
                    yield file, file.relative_to(root)


def _folder_of(name: str) -> Path | None:
    """Return the folder that contains a top-level module or package, or None for a built-in."""
    module = sys.modules.get(name)
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    found = next((Path(place).resolve() for place in places if place), None)
    if found is None:
        return None
    return found.parent.parent if found.name == "__init__.py" else found.parent
