"""Short forms of the ``data:`` section: ``data=DIR``, ``data=list.txt``, ``data=digits``, ..."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from selftask.registry import SOURCES

ARRAY_SUFFIXES = (".npz", ".npy")
LIST_SUFFIXES = (".txt", ".tsv", ".lst")
_OBJECT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def expand_source(text: str) -> dict[str, Any]:
    """The ``data:`` section that a short form stands for, as a plain dict with its ``name``.

    ``digits`` (or any registered name that needs no arguments), ``torchvision:CIFAR10``,
    ``x.npz``, ``list.txt``, ``package.module:Dataset``; everything else is a folder. A folder that
    is called like a source is written with its path: ``./digits``.
    """
    if text in SOURCES:
        return {"name": text}
    if text.startswith("torchvision:"):
        return {"name": "torchvision", "dataset": text.removeprefix("torchvision:")}
    if _OBJECT.fullmatch(text) and not Path(text).exists():
        return {"name": "custom", "dataset": text}
    suffix = Path(text).suffix.lower()
    if suffix in ARRAY_SUFFIXES and not Path(text).is_dir():
        return {"name": "array", "path": text}
    if suffix in LIST_SUFFIXES and not Path(text).is_dir():
        return {"name": "list", "path": text}
    return {"name": "folder", "path": text}
