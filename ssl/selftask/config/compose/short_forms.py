"""Short forms: a plain string where a section is expected.

``data=DIR``, ``backbone=timm:vit_small_patch16_224``, ``method=moco``, ``parallel=ddp``,
``- horizontal_flip``. They are written out before anything is merged, so that a short form in a
file and one on the command line mean the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selftask.config.compose.provenance import Key

_NAMED = {("backbone",), ("method",), ("optimizer",), ("data", "sampler"), ("data", "tokenizer")}
_SOURCES = {("data",), ("data", "val")}
_PATHS = {
    *_SOURCES,
    ("data", "sampler", "weights"),
    ("init", "backbone"),
    ("resume",),
    ("resume", "checkpoint"),
    ("out",),
}
_PATH_FIELDS = ("path", "root", "pattern", "labels_path", "stage_to")  # of data and data.val
_NAMED_ENTRIES = {("hooks",), ("meters",), ("eval", "evaluations")}


def expand(value: Any, path: Key = ()) -> Any:
    """``value``, which stands at ``path`` of a config, with every short form in it written out."""
    if isinstance(value, str):
        return _expand_text(value, path)
    if isinstance(value, dict):
        return {key: expand(item, (*path, str(key))) for key, item in value.items()}
    if isinstance(value, list) and is_pipeline(path):
        return [{"name": item} if isinstance(item, str) else item for item in value]
    return value


def is_pipeline(path: Key) -> bool:
    """Whether a list of transforms stands there: ``views.NAME.transforms``, ``eval.transforms``."""
    return path == ("eval", "transforms") or (
        len(path) == 3 and path[0] == "views" and path[2] == "transforms"
    )


def is_path(key: Key) -> bool:
    """Return whether the value at a key is a path, so that any text is a value."""
    return key in _PATHS or (key[:-1] in _SOURCES and key[-1] in _PATH_FIELDS)


def named_places(config: dict[str, Any]) -> list[Key]:
    """The paths of all sections that have a ``name``, also in lists of transforms."""
    entries = [(*place, key) for place in sorted(_NAMED_ENTRIES) for key in _mapping(config, place)]
    lists: list[Key] = [("eval", "transforms")]
    lists += [("views", group, "transforms") for group in _mapping(config, ("views",))]
    transforms = [item for place in lists for item in _named_items(_at(config, place), place)]
    return [*sorted(_NAMED), *sorted(_SOURCES), *entries, *transforms]


def _named_items(value: Any, path: Key) -> Iterator[Key]:
    """The items of a list, and of the lists in their fields, that are sections with a ``name``."""
    for index, item in enumerate(value if isinstance(value, list) else ()):
        place = (*path, str(index))
        if isinstance(item, dict) and "name" in item:
            yield place
            for field, inner in item.items():
                yield from _named_items(inner, (*place, field))


def default_name(path: Key) -> str | None:
    """What the thing there is called without a ``name``: a hook by its key, a method not at all."""
    return path[-1] if path[:-1] in _NAMED_ENTRIES else None


def expand_backbone(text: str) -> dict[str, Any]:
    """``resnet18``, ``timm:NAME``, ``torchvision:NAME`` or ``package.module:function``."""
    before, colon, after = text.partition(":")
    if not colon:
        return {"name": text}
    if before in ("timm", "torchvision"):
        return {"name": before, "model": after}
    return {"name": "custom", "model": text}


def expand_source(text: str) -> dict[str, Any]:
    """``digits``, a folder, a list of paths, an array file, ``torchvision:NAME``, ``module:Class``.

    What these mean is the data level's to say, which this level may not import, only call.
    """
    shorthand = importlib.import_module("selftask.config.compose.data_forms")
    return dict(shorthand.expand_source(text))


def _expand_text(text: str, path: Key) -> Any:
    if "${" in text or text == "???":  # OmegaConf's: a reference, or missing
        return text
    if path in _SOURCES:
        section = expand_source(text)
        return section["val"] if path != ("data",) and "val" in section else section
    if path == ("backbone",):
        return expand_backbone(text)
    if path == ("parallel",):
        return {"reduce": text}
    if path == ("resume",):
        return {"checkpoint": text}
    if path in _NAMED or path[:-1] in _NAMED_ENTRIES:
        return {"name": text}
    return text


def _mapping(config: dict[str, Any], path: Key) -> dict[str, Any]:
    value = _at(config, path)
    return value if isinstance(value, dict) else {}


def _at(config: dict[str, Any], path: Key) -> Any:
    value: Any = config
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
