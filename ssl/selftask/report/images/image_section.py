"""Section of the page with its own sprite sheet."""

from __future__ import annotations

from selftask.report.images.sprite import Sprite
from selftask.report.page import Section, static_text

_SCRIPTS = {"map-of-embeddings": "map.js"}  # by the section's id


def image_section(title: str, html: str, id: str, sprite: Sprite | None = None) -> Section:
    """Return a section with the style sheet of images, its script and its sprite sheet.

    Args:
        title: Heading.
        html: Content.
        id: Anchor in the page, which also selects the script.
        sprite: Images that ``html`` shows, if any.
    """
    sheet = f"<style>{sprite.css()}</style>" if sprite is not None and len(sprite) else ""
    script = static_text(_SCRIPTS[id]) if id in _SCRIPTS else ""
    return Section(title, f"{sheet}{html}", id, script=script, style=static_text("images.css"))
