"""Cache of sections in ``RUN/report/images.json``, so that a second report is fast."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from selftask import __version__
from selftask.errors import UserError
from selftask.files.cache_dir import cache_folder
from selftask.files.received import read_json
from selftask.files.replace import replacing
from selftask.report.images.image_section import image_section
from selftask.report.page import Section

FOLDER, NAME = "report", "images.json"
MAX_BYTES = 256 << 20
FORMAT = f"2 {__version__}"  # increase the number if the content of a section changes


class SectionCache:
    """Sections of a run by group, valid for a key of the weights, the config and the options.

    The cache is empty if its file is missing, damaged, of another version or of another user, whose
    HTML would be part of the page. Nothing is stored if the run folder is read-only.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / FOLDER / NAME
        self._groups = self._read()

    def get(self, group: str, key: str) -> list[Section] | None:
        """Return the sections of a group, or None.

        Args:
            group: Name of the group.
            key: Digest of all inputs of the sections.
        """
        entry = self._groups.get(group)
        if entry is None or entry["key"] != key:
            return None
        return [image_section(*fields) for fields in entry["sections"]]

    def put(self, group: str, key: str, sections: Sequence[Section]) -> None:
        """Store the sections of a group, in place of those with another key.

        Args:
            group: Name of the group.
            key: Digest of all inputs of the sections.
            sections: The sections; empty ones are not stored.
        """
        kept = [[section.title, section.html, section.id] for section in sections if section.html]
        self._groups[group] = {"key": key, "sections": kept}
        text = json.dumps(self._groups)
        content = json.dumps({"format": FORMAT, "groups": text, "signature": _signature(text)})
        with suppress(OSError):  # a report is also made of a read-only run
            self._path.parent.mkdir(exist_ok=True)
            with replacing(self._path) as temporary:
                temporary.write_text(content, encoding="utf-8")

    def _read(self) -> dict[str, Any]:
        try:
            content = read_json(self._path, MAX_BYTES)
        except OSError:
            return {}
        text, signature = content.get("groups"), str(content.get("signature"))
        if content.get("format") != FORMAT or not isinstance(text, str):
            return {}
        if not hmac.compare_digest(signature.encode(), _signature(text).encode()):
            return {}
        return dict(json.loads(text))


def _signature(text: str) -> str:
    """Return a text that only this user can compute; a random one without a cache folder."""
    try:
        key = _secret(cache_folder() / "report.key")
    except (OSError, UserError):
        key = os.urandom(32)
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def _secret(path: Path) -> bytes:
    """Return the random content of a file that only this user can read; make it if needed."""
    with suppress(FileExistsError):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(os.urandom(32))
    return path.read_bytes()


def digest(*parts: str | bytes | int) -> str:
    """Return a short hash of all parts."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        hasher.update(f"{len(data)}:".encode() + data)
    return hasher.hexdigest()
