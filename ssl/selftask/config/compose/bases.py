"""Bases of recipes by path or address: ``~/base.yaml``, ``https://host/base.yaml``.

Hydra looks names up in its folders only. A file elsewhere therefore gets a short name, which our
config source maps to the file.
"""

from __future__ import annotations

from pathlib import Path

from selftask.config.compose import recipes
from selftask.config.compose.endings import find_recipe, is_recipe_file
from selftask.config.compose.provenance import show_path
from selftask.errors import UserError
from selftask.files.addresses import fetch, is_remote
from selftask.files.paths import expand_user


class Bases:
    """Files that have a short name during one composition."""

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}  # short name -> file
        self.addresses: dict[Path, str] = {}  # local copy -> its address
        self.may_fetch = True

    def reset(self, *, may_fetch: bool) -> None:
        """Forget all files before the next composition; ``may_fetch`` allows downloads in it."""
        self.files, self.addresses, self.may_fetch = {}, {}, may_fetch

    def add(self, file: Path) -> str:
        """Return the short name of a file. It begins with ``~``, which no recipe name does."""
        file = file.resolve()
        for name, known in self.files.items():
            if known == file:
                return name
        self.files[name := f"~{len(self.files)}"] = file
        return name

    def name(self, entry: str, file: Path) -> str:
        """Return the name under which Hydra finds an entry of ``defaults:``.

        Args:
            entry: ``_self_``, or a base. A base is a name or path relative to ``file``, the name
                of a shipped or installed recipe (``/base/digits``), an absolute path with its
                extension, ``~/...`` or an address.
            file: The file that contains the entry.

        Raises:
            UserError: If there is no such file, or it cannot be fetched.
        """
        if entry == "_self_":
            return entry
        address = self._address(entry, file)
        if address is not None:
            return self._fetched(address)
        if entry.startswith("~") or (entry.startswith("/") and is_recipe_file(entry)):
            found = find_recipe(expand_user(entry))
            if found is None and entry.startswith("~"):
                raise UserError(f"there is no file {entry}")
        elif entry.startswith("/"):
            found = _installed(entry[1:])
        else:
            found = find_recipe(file.parent / entry) if file in self.files.values() else None
        return entry if found is None else self.add(found)

    def show(self, file: Path) -> str:
        """Return the address of a downloaded file, or the path of any other file."""
        return self.addresses.get(file) or show_path(file)

    def _address(self, entry: str, file: Path) -> str | None:
        """Return the address of an entry, also if it is relative to a downloaded file; or None."""
        if is_remote(entry):
            return entry
        if file not in self.addresses or entry.startswith(("/", "~")):
            return None
        folder = self.addresses[file].rpartition("/")[0]
        return f"{folder}/{entry}" if is_recipe_file(entry) else f"{folder}/{entry}.yaml"

    def _fetched(self, address: str) -> str:
        if not self.may_fetch:
            raise UserError(
                f"{address} would be fetched; if you trust where it comes from, add trust=true"
            )
        for file, known in self.addresses.items():
            if known == address:
                return self.add(file)
        file = fetch(address).resolve()
        self.addresses[file] = address
        return self.add(file)


def _installed(name: str) -> Path | None:
    """Return the file of an installed package's recipe; None if there is none or it is shipped."""
    if find_recipe(recipes.folder() / name) is not None:
        return None
    recipe = recipes.available().get(name)
    return None if recipe is None else recipe.path


BASES = Bases()
"""Bases of the current composition.

Global, because Hydra creates config sources itself and passes them no arguments of ours.
"""
