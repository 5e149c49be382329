"""Unpickling restricted to the names that the caller lists."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, BinaryIO


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickler for untrusted files.

    Args:
        file: The pickle, opened for reading.
        allowed: (module, name) -> object to use for it. It must be safe to call each object with
            any arguments.

    ``load`` raises pickle.UnpicklingError for any other name.
    """

    def __init__(self, file: BinaryIO, allowed: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        """Return the listed object for ``module.name``; import nothing."""
        try:
            return self._allowed[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"names {module}.{name}, which has no business there; nothing was run"
            ) from None
