"""Read weights from many kinds of files as one flat dict of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from selftask.checkpoint import store
from selftask.checkpoint.manifest import DamagedCheckpoint
from selftask.checkpoint.restricted_pickle import RefusedContent
from selftask.checkpoint.rotation import MANIFEST
from selftask.errors import UserError, explained, join_some
from selftask.files.addresses import fetch
from selftask.files.paths import is_file
from selftask.logs import get_logger
from selftask.models.weights.address import existing_file
from selftask.models.weights.foreign_pickle import read_tensors
from selftask.models.weights.layouts import flatten
from selftask.models.weights.lora import merged_state

log = get_logger(__name__)


def read_state(path: str | Path) -> dict[str, Tensor]:
    """Return the weights in a file as one flat dict with the file's keys.

    Supported are selftask's exports and checkpoints (also sharded), .safetensors, and nested dicts
    written by torch.save or pickle, whose keys are joined by dots. Nothing in a file is executed:
    objects other than tensors are dropped.

    Raises:
        UserError: If the file is missing or has no weights; the message explains what it is.
    """
    path = fetch(path)
    if is_file(path / MANIFEST):
        return backbone_state(read_backbone(path))
    path = existing_file(path)
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    state = _tensors(content)
    if not state:
        keys = list(content) if isinstance(content, Mapping) else type(content).__name__
        raise UserError(f"{path}: holds no weights: no tensors by name, but {join_some(keys)}")
    return state


def backbone_state(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the exported backbone's weights from a checkpoint, which names their location.

    For some methods these are the teacher's, which are not under "model".
    """
    return weights_at(checkpoint, checkpoint["backbone"])


def weights_at(checkpoint: Mapping[str, Any], path: str) -> dict[str, Tensor]:
    """Return the weights of a module in a checkpoint, such as ``method.teacher.network.head``.

    Adapters (``backbone.lora``) are merged. The result is empty if the module has no weights there.

    Raises:
        UserError: If the checkpoint lacks the first part of the path.
    """
    part, _, prefix = path.partition(".")
    weights = checkpoint.get(part)
    if not isinstance(weights, Mapping):
        raise UserError(f"the checkpoint lacks {part!r}, which has the weights of {path}")
    prefix += "."
    inner = {k.removeprefix(prefix): value for k, value in weights.items() if k.startswith(prefix)}
    return merged_state(inner)


def of_backbone(checkpoint: Mapping[str, Any], name: str) -> bool:
    """Return True if a tensor of a checkpoint is in ``backbone_state``; see ``store.load``."""
    return name.startswith(f"{checkpoint['backbone']}.")


def of_networks(checkpoint: Mapping[str, Any], name: str) -> bool:
    """Return True if a tensor of a checkpoint belongs to the network or the method."""
    return name.startswith(("model.", "method."))


def read_backbone(path: Path) -> dict[str, Any]:
    """Return the state of a checkpoint; of its tensors, only those of the backbone are read.

    Raises:
        UserError: If the checkpoint is missing or damaged.
    """
    read = partial(store.load, wanted=of_backbone)
    with explained(f"{path}: is damaged", DamagedCheckpoint, OSError):
        return store.load_with({"backbone": str, "clock": dict}, path, read)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path}: {_damaged(path)}") from error


def _read_torch(path: Path) -> Any:
    """Return the content of a ``torch.save`` or pickle file; other objects are placeholders."""
    try:
        content, skipped = read_tensors(path)
    except MemoryError:
        raise
    except RefusedContent as error:
        raise UserError(f"{path}: {_damaged(path)}: {error}") from error
    except Exception as error:  # unpickling other files may raise any error
        raise UserError(f"{path}: {_damaged(path)}") from error
    if not skipped:
        return content
    log.info("%s: left out: python objects (%s), which are not loaded", path, join_some(skipped))
    if not flatten(content):
        raise UserError(
            f"{path}: holds python objects ({join_some(skipped)}), which are not loaded because "
            "that could run code, and no tensors by name; save the model's state_dict instead"
        )
    return content


def _tensors(content: Any) -> dict[str, Tensor]:
    """Return a file's tensors by name; of a checkpoint of selftask, the backbone's weights."""
    if isinstance(content, Mapping) and isinstance(
        content.get("backbone"), str
    ):  # a checkpoint of selftask
        return backbone_state(content)
    return flatten(content)


def _damaged(path: Path) -> str:
    """Describe a file that the libraries cannot read; their own messages name internal calls."""
    with path.open("rb") as file:
        head = file.read(100).lstrip().lower()
    if head.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS instead of the weights; `git lfs pull` fetches them"
    if head.startswith((b"<!doctype", b"<html")):
        return "a web page instead of the weights; download the file once more"
    return f"damaged or no file of weights ({path.stat().st_size} bytes)"
