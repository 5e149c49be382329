"""Keys of a config, classified by their values: paths, components, lists of transforms."""

from __future__ import annotations

Key = tuple[str, ...]  # ("train", "epochs"); the index of a list item is a part as well
Problem = tuple[Key, str]  # a key, and what is wrong with its value

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
    """Return whether a key is ``views.NAME.transforms`` or ``eval.transforms``."""
    return path == ("eval", "transforms") or (
        len(path) == 3 and path[0] == "views" and path[2] == "transforms"
    )


def is_path(key: Key) -> bool:
    """Return whether the value at a key is a path or a source, so that any text is valid."""
    if key in _PATHS or is_source(key):
        return True
    return key[-1] in PATH_FIELDS and is_source(key[:-1])


def is_source(key: Key) -> bool:
    """Return whether a key names a source: ``data``, ``data.val`` or ``data.val_sets.NAME``."""
    return key in SOURCES or key[:-1] == ("data", "val_sets")


def default_name(path: Key) -> str | None:
    """Return the default ``name`` of an entry of ``NAMED_ENTRIES``, which is its key, else None."""
    return path[-1] if path[:-1] in NAMED_ENTRIES else None
