"""Cache of sections in ``RUN/report/images.json``, so that a second report is fast."""

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
FORMAT = f"1 {__version__}"  # increase the number if the content of a section changes


class SectionCache:
    """Sections of a run by group, valid for a key of the weights, the config and the options.

    The cache is empty if its file is missing, damaged or of another version. Nothing is stored if
    the run folder is read-only.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / FOLDER / NAME
        self._groups = self._read()

    def get(self, group: str, key: str, *, full: bool) -> list[Section] | None:
        """Return the sections of a group, or None.

        Args:
            group: Name of the group.
            key: Digest of all inputs of the sections.
            full: If True, ignore sections that were made with a time limit.
        """
        known = self._groups.get(group)
        if known is None or known["key"] != key or (full and not known["full"]):
            return None
        return [image_section(*fields) for fields in known["sections"]]

    def put(self, group: str, key: str, sections: Sequence[Section], *, full: bool) -> None:
        """Store the sections of a group, in place of those with another key."""
        kept = [[section.title, section.html, section.id] for section in sections if section.html]
        self._groups[group] = {"key": key, "full": full, "sections": kept}
        temporary = self._path.with_name(f".{NAME}.{os.getpid()}.tmp")
        content = json.dumps({"format": FORMAT, "groups": self._groups})
        with suppress(OSError):  # a report is also made of a read-only run
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
    """Return a short hash of all parts."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        found.update(f"{len(data)}:".encode() + data)
    return found.hexdigest()
