"""One self-contained HTML page that sends no requests and safely shows any text of a user."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from selftask.errors import masked
from selftask.files.replace import replacing

STATIC = Path(__file__).parent / "static"


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading. An empty section is omitted.

    Args:
        title: Heading, as plain text.
        html: Content, made by ``render``.
        id: Anchor in the page, with letters and hyphens only.
        script: JavaScript of this section, run after the page's own script. If several sections
            have the same script, it is included once.
        style: Style sheet of this section; equal ones are also included once.
    """

    title: str
    html: str
    id: str
    script: str = ""
    style: str = ""


def _shareable(value: Any) -> Any:
    """Mask passwords, since pages are shared, and replace lone surrogates, which UTF-8 lacks.

    The HTML of other macros is returned unchanged.
    """
    if hasattr(value, "__html__"):
        return value
    text = str(value)
    return masked(text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8"))


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=StrictUndefined,
    autoescape=True,
    auto_reload=False,
    finalize=_shareable,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(macro: str, *args: Any) -> str:
    """Render a macro of ``report/templates`` as HTML. Texts are escaped.

    The HTML of one macro may be an argument of another.

    Args:
        macro: Template and macro, such as ``run.head``.
        *args: Arguments of the macro.
    """
    template, _, name = macro.partition(".")
    return getattr(_TEMPLATES.get_template(f"{template}.html").module, name)(*args)


def json_data(content: Any, id: str) -> str:
    """Return a ``<script>`` element with data for the page's scripts.

    Scripts read it with ``JSON.parse(document.getElementById(id).textContent)``.

    Args:
        content: Values for JSON; floats must be finite.
        id: Id of the element.
    """
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":  # text must not close the element or open a comment
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{id}">{_shareable(text)}</script>'


@cache
def static_text(name: str) -> str:
    """Return the text of a script or style sheet in ``report/static``."""
    return (STATIC / name).read_text(encoding="utf-8")


def page_html(
    title: str,
    sections: Sequence[Section],
    *,
    top: str = "",
    scripts: Sequence[str] = (),
    connect: str = "'none'",
) -> str:
    """Return the whole page.

    Args:
        title: Title of the window, and the heading unless ``top`` is given.
        sections: Sections in order.
        top: HTML above the first section, with the page's heading.
        scripts: Additional JavaScript.
        connect: ``connect-src`` of the Content Security Policy; a page in a file needs none.
    """
    shown = [section for section in sections if section.html.strip()]
    base = [
        static_text("uplot/uPlot.iife.min.js"),
        static_text("page.js"),
        static_text("charts.js"),
    ]
    code = _unique([*base, *scripts, *(section.script for section in shown)])
    styles = [static_text("uplot/uPlot.min.css"), static_text("page.css")]
    styles = _unique([*styles, *(section.style for section in shown)])
    return render("page.page", title, shown, top, styles, code, [*map(_digest, code)], connect)


def write_page(path: Path, title: str, sections: Sequence[Section], *, top: str = "") -> None:
    """Write the page atomically, so that a reader never sees an incomplete page.

    Args:
        path: The file to write.
        title: As in ``page_html``.
        sections: As in ``page_html``.
        top: As in ``page_html``.

    Raises:
        OSError: If the file cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(page_html(title, sections, top=top), encoding="utf-8")


def relative_address(path: Path, folder: Path) -> str:
    """Return the address of a file in a page that is in ``folder``."""
    return quote(os.fsencode(os.path.relpath(path.resolve(), folder.resolve())))


def _unique(texts: Sequence[str]) -> list[str]:
    """Return the distinct texts in order, without empty ones."""
    return [text for text in dict.fromkeys(texts) if text]


def _digest(script: str) -> str:
    """Return the hash by which the Content Security Policy allows a script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
