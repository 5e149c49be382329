"""Finished sections in ``RUN/report/images.json``: a second report of the same weights is quick."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from selftask import __version__
from selftask.report.images.image_section import image_section
from selftask.report.page import Section

FOLDER, NAME = "report", "images.json"
FORMAT = f"1 {__version__}"  # raise the number if the content of a section changes


class SectionCache:
    """Sections of a run by group, valid for a key: of the weights, the config and the options.

    A file that is missing, damaged or of another version is an empty cache; a folder that cannot
    be written to keeps nothing.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / FOLDER / NAME
        self._groups = self._read()

    def get(self, group: str, key: str, *, full: bool) -> list[Section] | None:
        """Return the sections of a group, or None.

        Args:
            group: Name of the group.
            key: What the sections depend on.
            full: If True, do not accept sections that were made in a hurry.
        """
        known = self._groups.get(group)
        if known is None or known["key"] != key or (full and not known["full"]):
            return None
        return [image_section(*fields) for fields in known["sections"]]

    def put(self, group: str, key: str, sections: Sequence[Section], *, full: bool) -> None:
        """Keep the sections of a group; replaces those of another key."""
        kept = [[section.title, section.html, section.id] for section in sections if section.html]
        self._groups[group] = {"key": key, "full": full, "sections": kept}
        temporary = self._path.with_name(f".{NAME}.{os.getpid()}.tmp")
        content = json.dumps({"format": FORMAT, "groups": self._groups})
        with suppress(OSError):  # a run that may only be read is reported on all the same
            self._path.parent.mkdir(exist_ok=True)
            temporary.write_text(content, encoding="utf-8")
            os.replace(temporary, self._path)

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            return {}
        return dict(content["groups"])


def digest(*parts: str | bytes | int) -> str:
    """Return a short text that differs if any part does."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        found.update(f"{len(data)}:".encode() + data)
    return found.hexdigest()
