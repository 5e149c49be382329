"""Short forms: a plain string in place of a section.

Examples are ``data=DIR``, ``backbone=timm:vit_small_patch16_224``, ``method=moco``,
``parallel=ddp`` and ``- horizontal_flip``. They are expanded before files and overrides are
merged, so that a short form means the same in a file and on the command line.
"""

from __future__ import annotations

from typing import Any

from selftask.config.compose.data_forms import expand_source
from selftask.config.keys import NAMED, NAMED_ENTRIES, Key, is_pipeline, is_source


def expand(value: Any, path: Key = ()) -> Any:
    """Expand every short form in ``value``, the value at ``path`` of a config."""
    if isinstance(value, str):
        return _expand_text(value, path)
    if isinstance(value, dict):
        return {key: expand(item, (*path, str(key))) for key, item in value.items()}
    if isinstance(value, list) and is_pipeline(path):
        return [{"name": item} if isinstance(item, str) else item for item in value]
    return value


def expand_backbone(text: str) -> dict[str, Any]:
    """Expand ``resnet18``, ``timm:NAME``, ``torchvision:NAME`` or ``package.module:function``."""
    before, colon, after = text.partition(":")
    if not colon:
        return {"name": text}
    if before in ("timm", "torchvision"):
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
