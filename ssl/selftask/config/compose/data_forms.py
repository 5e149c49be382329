"""Short forms of the ``data:`` section: ``data=DIR``, ``data=list.txt``, ``data=digits``, ..."""

from __future__ import annotations

import re
from typing import Any

from selftask.config.compose.catalog import look_up
from selftask.errors import UserError
from selftask.files.addresses import is_remote
from selftask.files.paths import exists, expand_user, is_file, is_folder
from selftask.registry import SOURCES

_OBJECT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_PATTERN = re.compile(r"[*?\[]|\{[^{}]*(,|\.\.)[^{}]*\}")  # wildcards, or braces with a choice
_BY_SUFFIX = {
    **dict.fromkeys((".npz", ".npy"), "array"),
    **dict.fromkeys((".txt", ".lst"), "list"),
    **dict.fromkeys((".csv", ".tsv", ".parquet", ".pq", ".json", ".jsonl"), "table"),
    **dict.fromkeys((".h5", ".hdf5"), "hdf5"),
    ".mdb": "lmdb",
    ".tar": "webdataset",
}
_BY_CONTENT = {
    "data.mdb": "lmdb",
    "dataset_dict.json": "huggingface",
    "dataset_info.json": "huggingface",
}  # file in a folder -> kind of data set that the folder then is


def expand_source(text: str) -> dict[str, Any]:
    """Return the ``data:`` section of a short form, as a plain dict with its ``name``.

    Short forms are ``digits`` (or any registered name that needs no arguments), a name in the
    catalog (see ``selftask.config.compose.catalog``), ``torchvision:CIFAR10``, ``x.npz``,
    ``list.txt``, ``table.csv``, ``/x/**/*.jpg``, ``train-{000..146}.tar``, ``s3://bucket/*.tar``,
    ``x.h5``, the folder of an LMDB or of Hugging Face's ``save_to_disk``, and
    ``package.module:Dataset``. Everything else is a folder of images. A folder with the name of a
    source needs a path: ``./digits``.
    """
    if text in SOURCES:
        return {"name": text}
    entry = look_up(text)
    if entry is not None:
        return _expand_entry(text, entry)
    if text.startswith("torchvision:"):
        return {"name": "torchvision", "dataset": text.removeprefix("torchvision:")}
    path = expand_user(text)
    if is_folder(path):
        inside = (name for file, name in _BY_CONTENT.items() if is_file(path / file))
        return {"name": next(inside, "folder"), "path": text}
    if _OBJECT.fullmatch(text) and not exists(path):
        return {"name": "custom", "dataset": text}
    is_pattern = _PATTERN.search(text) and not exists(path)
    if path.suffix.lower() == ".tar" or (is_pattern and is_remote(text)):
        return {"name": "webdataset", "path": text}
    if is_pattern:
        return {"name": "glob", "pattern": text}
    return {"name": _BY_SUFFIX.get(path.suffix.lower(), "folder"), "path": text}


def _expand_entry(
    name: str, entry: dict[str, Any] | str, seen: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the section of a catalog entry with its short forms expanded."""
    if isinstance(entry, str):
        return _expand_from(name, entry, seen)
    section = dict(entry)
    if "name" not in section:
        if not isinstance(section.get("path"), str):
            raise UserError(f"the catalog's {name}: `name` or `path` is missing")
        section = {**_expand_from(name, section["path"], seen), **section}
    if isinstance(section.get("val"), str):
        val = _expand_from(name, section["val"], seen)
        section["val"] = val.get("val", val)
    return section


def _expand_from(name: str, text: str, seen: tuple[str, ...]) -> dict[str, Any]:
    """Expand a short form in the entry ``name``; it may be the name of another entry."""
    if text in (*seen, name):
        raise UserError(f"the catalog's {name}: entries that stand for each other")
    inner = None if text in SOURCES else look_up(text)
    return expand_source(text) if inner is None else _expand_entry(text, inner, (*seen, name))
