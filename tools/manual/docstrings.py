"""Sphinx extension: docstrings of attributes are sentences.

Napoleon treats the text before a colon in the docstring of an attribute as its type, as in ``Ids:
of the images``. Colons are therefore hidden from it and restored afterwards.
"""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

_HIDDEN = "\ue000"  # a private-use Unicode character
_KINDS = ("attribute", "data", "property")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register one handler before Napoleon's and one after it."""
    app.connect("autodoc-process-docstring", hide, priority=400)
    app.connect("autodoc-process-docstring", show, priority=600)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def hide(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Replace the colons in the docstring of an attribute."""
    if what in _KINDS:
        lines[:] = [line.replace(":", _HIDDEN) for line in lines]


def show(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Restore the colons."""
    lines[:] = [line.replace(_HIDDEN, ":") for line in lines]
