"""Keys of a config, and which of them hold paths, components and lists of transforms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Key = tuple[str, ...]  # ("train", "epochs"); the index of a list item is a part as well

NAMED = {
    ("backbone",),
    ("method",),
    ("optimizer",),
    ("data", "sampler"),
    ("data", "tokenizer"),
    ("train", "step"),
}
SCHEDULED = {("optimizer", name) for name in ("lr", "schedule", "weight_decay")}
SOURCES = {("data",), ("data", "val")}
_PATHS = {
    *SOURCES,
    ("data", "sampler", "weights"),
    ("init", "backbone"),
    ("resume",),
    ("resume", "checkpoint"),
    ("out",),
}
PATH_FIELDS = ("path", "root", "pattern", "labels_path", "stage_to")  # fields of a source
NAMED_ENTRIES = {("hooks",), ("meters",), ("eval", "evaluations"), ("data", "val_sets")}


def dotted(key: Key) -> str:
    """Return a key as users write it: ``train.epochs``."""
    return ".".join(key)


def is_pipeline(path: Key) -> bool:
    """Return whether a key holds a list of transforms (``views.NAME.``, ``eval.transforms``)."""
    return path == ("eval", "transforms") or (
        len(path) == 3 and path[0] == "views" and path[2] == "transforms"
    )


def is_path(key: Key) -> bool:
    """Return whether the value at a key is a path, so that any text is valid."""
    if key in _PATHS or is_source(key):
        return True
    return key[-1] in PATH_FIELDS and is_source(key[:-1])


def is_source(key: Key) -> bool:
    """Return whether a key holds a source of images: ``data``, ``data.val`` or a named set."""
    return key in SOURCES or key[:-1] == ("data", "val_sets")


def named_places(config: dict[str, Any]) -> list[Key]:
    """Return the keys of all sections that may have a ``name``, also in lists of transforms."""
    entries = [(*place, key) for place in sorted(NAMED_ENTRIES) for key in _mapping(config, place)]
    lists: list[Key] = [("eval", "transforms")]
    lists += [("views", group, "transforms") for group in _mapping(config, ("views",))]
    transforms = [item for place in lists for item in _named_items(_at(config, place), place)]
    return [*sorted(NAMED | SCHEDULED | SOURCES), *entries, *transforms]


def _named_items(value: Any, path: Key) -> Iterator[Key]:
    """Yield the keys of sections with a ``name`` in a list and in nested lists."""
    for index, item in enumerate(value if isinstance(value, list) else ()):
        place = (*path, str(index))
        if isinstance(item, dict) and "name" in item:
            yield place
            for field, inner in item.items():
                yield from _named_items(inner, (*place, field))


def default_name(path: Key) -> str | None:
    """Return the default name of a hook, meter or evaluation, which is its key; else None."""
    return path[-1] if path[:-1] in NAMED_ENTRIES else None


def _mapping(config: dict[str, Any], path: Key) -> dict[str, Any]:
    value = _at(config, path)
    return value if isinstance(value, dict) else {}


def _at(config: dict[str, Any], path: Key) -> Any:
    value: Any = config
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
