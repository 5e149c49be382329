"""Short forms: a plain string in place of a section, and names for data sets.

Examples are ``data=DIR``, ``backbone=timm:vit_small_patch16_224``, ``method=moco``,
``parallel=ddp`` and ``- horizontal_flip``. They are expanded before files and overrides are
merged, so that a short form means the same in a file and on the command line.

``data=imagenet`` refers to a section of a ``catalog.yaml``. The catalog is the file
``$SELFTASK_CATALOG`` if that is set. Otherwise it is ``~/.config/selftask/catalog.yaml`` together
with ``catalog.yaml`` in the current folder, whose entries take precedence.
``$SELFTASK_DATA_IMAGENET`` replaces the path of one entry, so that a recipe with names runs
unchanged on another machine.
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from selftask.config.keys import NAMED, NAMED_ENTRIES, Key, is_pipeline, is_source
from selftask.config.library_names import LIBRARIES
from selftask.config.schema.frozen import is_code
from selftask.errors import UserError, explained
from selftask.files.addresses import is_remote
from selftask.files.paths import exists, expand_user, is_file, is_folder
from selftask.registry import SOURCES

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
_NAME = re.compile(r"[A-Za-z][\w-]*")
_PLACES = ("path", "pattern", "root")  # fields with the location of the data, by kind of source


def expand(value: Any, path: Key = ()) -> Any:
    """Return ``value``, the value at ``path`` of a config, with every short form expanded.

    Raises:
        UserError: As ``look_up``, for the name of a data set.
    """
    if isinstance(value, str):
        return _expand_text(value, path)
    if isinstance(value, dict):
        return {key: expand(item, (*path, str(key))) for key, item in value.items()}
    if isinstance(value, list) and is_pipeline(path):
        return [{"name": item} if isinstance(item, str) else item for item in value]
    return value


def expand_backbone(text: str) -> dict[str, Any]:
    """Return the section of ``resnet18``, ``timm:NAME``, ``torchvision:NAME`` or
    ``package.module:function``.
    """
    before, colon, after = text.partition(":")
    if not colon:
        return {"name": text}
    if before in LIBRARIES:
        return {"name": before, "model": after}
    return {"name": "custom", "model": text}


def _expand_text(text: str, path: Key) -> Any:
    if "${" in text or text == "???":  # a reference or a missing value of OmegaConf
        return text
    if is_source(path):
        section = expand_source(text)
        return section["val"] if path != ("data",) and "val" in section else section
    if path == ("backbone",):
        return expand_backbone(text)
    if path == ("parallel",):
        return {"reduce": text}
    if path == ("resume",):
        return {"checkpoint": text}
    if path in NAMED or path[:-1] in NAMED_ENTRIES:
        return {"name": text}
    return text


def expand_source(text: str) -> dict[str, Any]:
    """Return the ``data:`` section of a short form, as a plain dict with its ``name``.

    Short forms are ``digits`` (or any registered name that needs no arguments), a name in the
    catalog, ``torchvision:CIFAR10``, ``x.npz``, ``list.txt``, ``table.csv``, ``/x/**/*.jpg``,
    ``train-{000..146}.tar``, ``s3://bucket/*.tar``, ``x.h5``, the folder of an LMDB or of Hugging
    Face's ``save_to_disk``, and ``package.module:Dataset``. Everything else is a folder of images.
    A folder that has the name of a source must be written as a path: ``./digits``.

    Raises:
        UserError: As ``look_up``, or if an entry of the catalog is incomplete or refers to itself.
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
    if is_code(text) and not exists(path):
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
        raise UserError(f"the catalog's {name}: its entry refers to itself, through {text!r}")
    inner = None if text in SOURCES else look_up(text)
    return expand_source(text) if inner is None else _expand_entry(text, inner, (*seen, name))


def look_up(name: str) -> dict[str, Any] | str | None:
    """Return the catalog entry of a name, or None.

    An entry is a ``data:`` section or another short form. If the environment variable
    ``variable(name)`` is set, its value replaces the path of the section, or the whole short form;
    without an entry, the value is returned.

    Raises:
        UserError: If the catalog is invalid; if the name only resembles an entry and no such file
            exists; or if ``variable(name)`` is set for an entry without a path.
    """
    if not _NAME.fullmatch(name):
        return None
    entries = read_catalog()
    moved = os.environ.get(variable(name))
    entry, file = entries.get(name, (None, ""))
    if entry is None:
        if moved is None:
            _hint(name, list(entries))
        return moved
    if moved is None:
        return entry
    if isinstance(entry, str):
        return moved
    field = next((field for field in _PLACES if field in entry), None)
    if field is None:
        raise UserError(f"{variable(name)}: {name} in {file} has no path to replace")
    return {**entry, field: moved}


def variable(name: str) -> str:
    """Return the environment variable of an entry: ``SELFTASK_DATA_CUB_200`` for ``cub-200``."""
    return "SELFTASK_DATA_" + re.sub(r"\W", "_", name).upper()


def read_catalog() -> dict[str, tuple[dict[str, Any] | str, str]]:
    """Return name -> (entry, its file) for the entries of all catalogs.

    Raises:
        UserError: If a catalog cannot be read or has an invalid entry.
    """
    entries: dict[str, tuple[dict[str, Any] | str, str]] = {}
    for path in _files():
        for name, entry in _read(path).items():
            if isinstance(entry, dict):
                entry = {str(key): value for key, value in entry.items()}
            entries[str(name)] = (entry, str(path))
    return entries


def _files() -> list[Path]:
    address = os.environ.get("SELFTASK_CATALOG")
    if address:
        path = expand_user(address)
        if not is_file(path):
            raise UserError(f"SELFTASK_CATALOG: there is no file {path}")
        return [path]
    home = expand_user(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    usual = [home / "selftask" / "catalog.yaml", Path("catalog.yaml")]
    return [path for path in usual if is_file(path)]


def _read(path: Path) -> dict[str, Any]:
    problem = f"the catalog {path} cannot be read"
    with explained(problem, OSError, UnicodeDecodeError, yaml.YAMLError):
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UserError(f"the catalog {path}: `name: folder` or `name: section` is expected")
    for name, entry in values.items():
        if not _NAME.fullmatch(str(name)) or str(name) in SOURCES:
            reason = "is a source's" if str(name) in SOURCES else "is not a valid name"
            raise UserError(
                f"the catalog {path}: {name!r} {reason}; letters, digits, _ and - make a name"
            )
        if not isinstance(entry, str) and not (isinstance(entry, dict) and entry):
            raise UserError(
                f"the catalog {path}: {name} is {entry!r}; a path or a section is expected"
            )
    return values


def _hint(name: str, names: list[str]) -> None:
    close = get_close_matches(name, names, n=1, cutoff=0.75)
    if close and not os.path.exists(name):
        raise UserError(
            f"data={name}: neither a folder nor in the catalog; did you mean {close[0]!r}? "
            f"(./{name} is a folder that is made later)"
        )
