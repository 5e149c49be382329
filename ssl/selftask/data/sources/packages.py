"""Check for optional packages that some sources need."""

from __future__ import annotations

import importlib.util

from selftask.errors import UserError


def require(package: str, extra: str, purpose: str, key: str = "data") -> None:
    """Raise UserError with an install command if a package is missing; nothing is imported.

    Args:
        package: Name of the package.
        extra: Extra of selftask that installs it.
        purpose: What needs the package, in the plural, such as ``HDF5 files``.
        key: Config key or option that asks for it.
    """
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{key}: {purpose} need the package {package}: pip install {package}, or "
            f"pip install 'selftask[{extra}]'"
        )
