"""Column name of unreadable images, and access to the sentences about them in a status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNREADABLE = "unreadable_images"
"""Column of ``metrics.jsonl``, a number, and entry of ``status.json``, a list of sentences."""


def unreadable_sentences(status: Mapping[str, Any]) -> list[str]:
    """Return the sentences about unreadable images in a ``status.json``, one for each data set."""
    entry = status.get(UNREADABLE)
    return [text for text in entry if isinstance(text, str)] if isinstance(entry, list) else []
