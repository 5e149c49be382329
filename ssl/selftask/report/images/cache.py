"""Cache of sections below ``$SELFTASK_CACHE/report``, so that a second report is fast."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from selftask import __version__
from selftask.files.cache_dir import cache_path
from selftask.files.received import read_json
from selftask.files.replace import replacing
from selftask.report.images.sprite import image_section
from selftask.report.page import Section

MAX_BYTES = 256 << 20
FORMAT = f"2 {__version__}"  # increase the number if the content of a section changes


class SectionCache:
    """Cached sections of a run in groups; each group is valid for one key.

    A cache file that is missing, damaged, of another version or of another user is ignored. The
    file is not in the run folder, since its HTML becomes part of the page and a run may come from
    somebody else. Nothing is stored if the cache folder is read-only.
    """

    def __init__(self, run: Path) -> None:
        self._path = cache_path() / "report" / f"{digest(str(run.resolve()))}.json"
        self._groups = self._read()

    def get(self, group: str, key: str) -> list[Section] | None:
        """Return the sections of a group, or None if they are not cached with this key.

        Args:
            group: Name of the group.
            key: Digest of all inputs of the sections.
        """
        entry = self._groups.get(group)
        if entry is None or entry["key"] != key:
            return None
        return [image_section(*fields) for fields in entry["sections"]]

    def put(self, group: str, key: str, sections: Sequence[Section]) -> None:
        """Store the sections of a group, replacing those that were stored before.

        Args:
            group: Name of the group.
            key: Digest of all inputs of the sections.
            sections: The sections; empty ones are not stored.
        """
        kept = [[section.title, section.html, section.id] for section in sections if section.html]
        self._groups[group] = {"key": key, "sections": kept}
        content = json.dumps({"format": FORMAT, "groups": self._groups})
        with suppress(OSError):  # a report is also made without a cache folder
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._path) as temporary:
                temporary.write_text(content, encoding="utf-8")

    def _read(self) -> dict[str, Any]:
        try:
            content = read_json(self._path, MAX_BYTES)
            is_own = self._path.stat().st_uid == os.getuid()
        except OSError:
            return {}
        return dict(content["groups"]) if is_own and content.get("format") == FORMAT else {}


def digest(*parts: str | bytes | int) -> str:
    """Return a short hash of all parts."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode(errors="surrogateescape")
        hasher.update(f"{len(data)}:".encode() + data)
    return hasher.hexdigest()
