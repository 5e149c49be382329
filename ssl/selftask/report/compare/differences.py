"""Differences between the configs of runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from selftask.config.library_names import LIBRARIES
from selftask.report import settings

SEED = "train.seed"
# Keys that do not affect the result: run folder, launch options, logging, kept checkpoints.
_PLACE = (
    *("out", "recipe", "import", "train.threads", "data.num_workers"),
    *("train.report", "train.log_every", "train.keep_checkpoints"),
)
_PLACES = ("launch.", "resume.")


def flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the values as text by dotted key; a library's model is one value, ``timm:NAME``."""
    texts = {key: settings.shown(value) for key, value in settings.flat(config)}
    for key in [key for key in texts if key.endswith(".model")]:
        name = f"{key.removesuffix('model')}name"
        if texts.get(name) in LIBRARIES:
            texts[name] = f"{texts[name]}:{texts.pop(key)}"
    return texts


def identity(config: Mapping[str, Any]) -> str:
    """Return a text that is equal for configs that differ in the seed only.

    Keys that do not affect the result, such as ``out`` and ``launch.*``, are not compared.
    """
    kept = {key: value for key, value in flat(config).items() if key != SEED and not _is_place(key)}
    return json.dumps(kept, sort_keys=True)


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in which configs differ, in the order of the first config, the seed last.

    Keys that do not affect the result, such as ``out``, are omitted. If the name of a component
    differs (``optimizer.name``), settings that only some of the components have are also omitted.
    Empty configs, which could not be read, are ignored.
    """
    texts = [flat(config) for config in configs if config]  # empty if it could not be read
    keys = list(dict.fromkeys(key for text in texts for key in text))
    different = [key for key in keys if not _is_place(key) and len({t.get(key) for t in texts}) > 1]
    named = {key.removesuffix("name") for key in different if key.endswith(".name")}
    kept = [
        key
        for key in different
        if key.endswith(".name")
        or all(key in text for text in texts)
        or not key.startswith(tuple(named))
    ]
    return sorted(kept, key=lambda key: key == SEED)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the short name of each key: the fewest last parts of the key that are unique.

    A last part ``name`` or ``enabled`` is dropped.
    """
    names = {}
    for key in keys:
        parts = key.split(".")
        if parts[-1] in ("name", "enabled") and len(parts) > 1:
            parts = parts[:-1]
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[-count:])
            if not any(_ends_with(other, name) for other in keys if other != key):
                break
        names[key] = name
    return names


def _ends_with(key: str, name: str) -> bool:
    key = key.removesuffix(".name")
    return key == name or key.endswith(f".{name}")


def _is_place(key: str) -> bool:
    return key in _PLACE or key.startswith(_PLACES)
