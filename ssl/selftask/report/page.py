"""One self-contained HTML page that sends no requests and safely shows any text of a user."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from selftask.errors import masked
from selftask.files.replace import replacing

STATIC = Path(__file__).parent / "static"


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading. An empty section is left out.

    Args:
        title: Heading, as plain text.
        html: Content. Text that is not from selftask must be passed through ``escape``; charts are
            made by ``selftask.report.charts``.
        id: Anchor in the page, with letters and hyphens only.
        folded: If True, the section is closed until the reader opens it.
        script: JavaScript of this section, run after the page's own script. If several sections
            have the same script, it is included once.
        style: Style sheet of this section; equal ones are also included once.
    """

    title: str
    html: str
    id: str
    folded: bool = False
    script: str = ""
    style: str = ""


def escape(text: object) -> str:
    """Escape a text for use in the content or a quoted attribute of an element.

    Passwords in addresses are masked, since pages are shared.
    """
    return _shareable(html.escape(str(text), quote=True))


def _shareable(text: str) -> str:
    """Mask passwords, and replace lone surrogates, which UTF-8 cannot hold."""
    text = text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
    return masked(text)


def json_data(content: Any, id: str) -> str:
    """Return a ``<script>`` element with data for the page's scripts.

    Scripts read it with ``JSON.parse(document.getElementById(id).textContent)``. Floats that are
    not finite become null.
    """
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":  # text must not close the element or open a comment
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{escape(id)}">{_shareable(text)}</script>'


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
        scripts: Further JavaScript.
        connect: ``connect-src`` of the Content Security Policy; a page in a file needs none.
    """
    shown = [section for section in sections if section.html]
    base = [
        static_text("uplot/uPlot.iife.min.js"),
        static_text("page.js"),
        static_text("charts.js"),
    ]
    code = _unique([*base, *scripts, *(section.script for section in shown)])
    styles = [static_text("uplot/uPlot.min.css"), static_text("page.css")]
    styles = _unique([*styles, *(section.style for section in shown)])
    policy = "; ".join(
        (
            "default-src 'none'",
            "img-src data: blob:",
            "style-src 'unsafe-inline'",
            f"connect-src {connect}",
            f"script-src {' '.join(map(_digest, code))}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    contents = "".join(f'<a href="#{escape(s.id)}">{escape(s.title)}</a>' for s in shown)
    body = "\n".join(map(_section, shown))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
{"".join(f"<style>{style}</style>" for style in styles)}
</head>
<body>
<button id="theme" type="button" aria-label="light or dark">◐</button>
<main>
{top or f"<h1>{escape(title)}</h1>"}
<nav aria-label="contents">{contents}</nav>
{body}
</main>
<div id="tip" role="status" hidden></div>
<noscript>Curves and tables that sort need JavaScript.</noscript>
{"".join(f"<script>{text}</script>" for text in code)}
</body>
</html>
"""


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


def _section(section: Section) -> str:
    heading = f"<h2>{escape(section.title)}</h2>"
    if section.folded:
        content = f"<details><summary>{heading}</summary>{section.html}</details>"
    else:
        content = heading + section.html
    return f'<section id="{escape(section.id)}">{content}</section>'


def _unique(texts: Sequence[str]) -> list[str]:
    """Return the distinct texts in order, without empty ones."""
    return [text for text in dict.fromkeys(texts) if text]


def _digest(script: str) -> str:
    """Return the hash by which the Content Security Policy allows a script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
