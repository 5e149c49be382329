"""Records of unreadable images in ``metrics.jsonl`` and ``status.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNREADABLE = "unreadable_images"
"""Key of a number in ``metrics.jsonl`` and of a list of sentences in ``status.json``."""


def unreadable_sentences(status: Mapping[str, Any]) -> list[str]:
    """Return the sentences about unreadable images in a ``status.json``, one for each data set."""
    entry = status.get(UNREADABLE)
    return [text for text in entry if isinstance(text, str)] if isinstance(entry, list) else []
