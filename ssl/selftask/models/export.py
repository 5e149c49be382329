"""A backbone as others can use it: plain tensors under its library's own names, and their facts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selftask.models.build import embed_dim

WEIGHTS = "backbone.pt"
SAFETENSORS = "backbone.safetensors"
META = "backbone.json"


def save_backbone(backbone: nn.Module, folder: str | Path, meta: dict[str, Any]) -> Path:
    """Write ``backbone.pt``, ``.safetensors`` and ``.json`` into ``folder``; return the first.

    The two weight files hold the same flat dict, on the CPU, with exactly the keys of the library
    the architecture comes from, so that its model loads them with ``strict=True``. ``meta`` is
    what one must know to use them, plain values only: ``architecture`` ({"name", "args"}),
    ``channels`` of images, ``normalization`` ({"mean", "std"}), ``input_size`` (pixels),
    ``method``, ``step``; ``embed_dim`` is added. Each file is replaced at once or not at all.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = portable_state(backbone)
    facts = {"format": "selftask backbone 1", "embed_dim": embed_dim(backbone), **meta}
    text = json.dumps(facts, indent=2) + "\n"
    _replace(folder / SAFETENSORS, lambda path: save_file(state, path))
    _replace(folder / META, lambda path: path.write_text(text, encoding="utf-8"))
    _replace(folder / WEIGHTS, lambda path: torch.save(state, path))
    return folder / WEIGHTS


def portable_state(module: nn.Module) -> dict[str, Tensor]:
    """The state dict as CPU tensors that own their memory; what wrappers add to keys removed."""
    clean: dict[str, Tensor] = {}
    for key, value in module.state_dict().items():
        for wrapper in ("module.", "_orig_mod.", "_fsdp_wrapped_module."):
            key = key.replace(wrapper, "")
        clean[key] = value.detach().to("cpu", copy=True).contiguous()
    return clean


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write to a temporary file beside ``path``, make it durable, rename it."""
    temporary = path.with_name(f".{path.name}.tmp")
    write(temporary)
    os.umask(mask := os.umask(0))
    temporary.chmod(0o666 & ~mask)  # safetensors gives none but the owner access
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
