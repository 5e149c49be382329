"""Export of a backbone: plain tensors under its library's own names, with metadata."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selftask.checkpoint.manifest import sync, write_checked
from selftask.config.schema import Component
from selftask.errors import UserError
from selftask.files.replace import replacing
from selftask.models.build import build_backbone, embed_dim
from selftask.models.eval_mode import in_eval_mode
from selftask.models.features.extract import fixed_size
from selftask.models.weights.layouts import WRAPPERS
from selftask.registry import TRANSFORMS

WEIGHTS = "backbone.pt"
SAFETENSORS = "backbone.safetensors"
META = "backbone.json"
UNKNOWN_SIZE = 224  # pixels, if the images of the run had sizes of their own


def save_backbone(backbone: nn.Module, folder: str | Path, meta: dict[str, Any]) -> Path:
    """Write ``backbone.pt``, ``.safetensors`` and ``.json`` into ``folder``.

    The two weight files contain the same flat dict, on the CPU, with exactly the keys of the
    architecture's library, whose model loads them with ``strict=True``. Each file is replaced
    atomically.

    Args:
        backbone: The backbone; ``embed_dim`` is added to the metadata.
        folder: Folder to write to.
        meta: Metadata of plain values: ``architecture`` ({"name", "args"}), ``channels`` of images,
            ``normalization`` ({"mean", "std"}), ``input_size`` (pixels), ``method``, ``step``.

    Returns:
        The path of ``backbone.pt``.
    """
    from safetensors.torch import save  # not save_file: its error on a full disk is not an OSError

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = portable_state(backbone)
    facts = {"format": "selftask backbone 1", "embed_dim": embed_dim(backbone), **meta}
    text = json.dumps(facts, indent=2) + "\n"
    write_whole(folder / SAFETENSORS, lambda path: path.write_bytes(save(state)))
    write_whole(folder / META, lambda path: path.write_text(text, encoding="utf-8"))
    write_whole(folder / WEIGHTS, lambda path: write_checked(state, path))
    return folder / WEIGHTS


def check_library(
    backbone: nn.Module, architecture: Component, channels: int, library: str
) -> None:
    """Raise UserError unless a library's model loads these weights and computes the same features.

    The model is built by its name in the library. Two kinds of backbone are not checked: models
    built by the library, and vision transformers of selftask with learned positions, which are
    instances of timm's VisionTransformer without a model name in timm.

    Args:
        backbone: The backbone to export.
        architecture: Name and arguments of the backbone.
        channels: Channels of the images.
        library: ``timm`` or ``torchvision``.
    """
    if architecture.name == library or type(backbone).__module__.startswith(f"{library}.models.vi"):
        return
    name = architecture.args.get("model", architecture.name)
    wanted = Component(name=library, args={"model": name, "args": {}})
    subject = f"export: --to {library}"
    try:
        theirs = build_backbone(wanted, channels)
    except UserError as error:
        reason = str(error).removeprefix("backbone.model: ").partition("; did you mean")[0]
        text = f"{subject}: {reason}; --to safetensors writes the weights alone"
        raise UserError(text) from error
    check_features(backbone, theirs, subject=f"{subject}: its {name}", shape=(channels, 64, 64))


@torch.no_grad()
def check_features(
    backbone: nn.Module, theirs: nn.Module, *, subject: str, shape: tuple[int, int, int]
) -> None:
    """Raise UserError unless another model loads these weights and computes the same features.

    Args:
        backbone: The backbone.
        theirs: The other model; its weights are replaced.
        subject: Beginning of the message.
        shape: Shape (C, H, W) of the random images.
    """
    try:
        theirs.load_state_dict(portable_state(backbone), strict=True)
    except RuntimeError as error:
        first = " ".join(str(error).split("\n", 2)[1].split())[:200]
        raise UserError(f"{subject} does not load these weights: {first}") from error
    images = torch.rand(2, *shape)
    with in_eval_mode(backbone), in_eval_mode(theirs):
        if not same_features(theirs(images), backbone(images)):
            raise UserError(f"{subject} takes these weights and computes other features")


def same_features(theirs: Tensor, ours: Tensor) -> bool:
    """Return whether features are equal up to 1e-3 of each one plus 1e-4 of the largest one."""
    return torch.allclose(theirs, ours, rtol=1e-3, atol=1e-4 * float(ours.abs().max()))


def traced_size(backbone: nn.Module, facts: dict[str, Any]) -> tuple[int, int] | None:
    """Return height and width of images: the only accepted size, that of ``facts``, or None."""
    size = facts.get("input_size")
    return fixed_size(backbone) or ((size, size) if size else None)


def example_images(backbone: nn.Module, facts: dict[str, Any]) -> Tensor:
    """Return two images (2, C, H, W) to trace a backbone with; 224 x 224 if no size is known."""
    size = traced_size(backbone, facts) or (UNKNOWN_SIZE, UNKNOWN_SIZE)
    return torch.zeros(2, facts.get("channels", 3), *size)


def metadata(
    backbone: Component, transforms: Sequence[Component], *, channels: int, **origin: Any
) -> dict[str, Any]:
    """Return the content of ``backbone.json``: architecture, input, origin.

    Args:
        backbone: The architecture.
        transforms: Transforms of its input images.
        channels: Number of channels of the images.
        **origin: Other values, such as ``method`` and ``step``.
    """
    pipeline = [transform.to_dict() for transform in transforms]
    normalize = next((t for t in transforms if t.name == "normalize"), None)
    mean, std = (None, None)
    if normalize is not None:
        mean, std = TRANSFORMS["normalize"](**normalize.args).moments(channels)
    sizes = [t["size"] for t in pipeline if "size" in t]
    return {
        "architecture": shown(backbone),
        "channels": channels,
        "normalization": {"mean": mean, "std": std},
        "input_size": sizes[-1] if sizes else None,
        "transforms": pipeline,
        **origin,
    }


def shown(backbone: Component) -> dict[str, Any]:
    """Return the ``architecture`` of the metadata."""
    return {"name": backbone.name, "args": dict(backbone.args)}


def portable_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict as CPU copies, with prefixes of wrappers removed from the keys."""
    clean: dict[str, Tensor] = {}
    for key, value in module.state_dict().items():
        clean[WRAPPERS.sub("", key)] = value.detach().to("cpu", copy=True).contiguous()
    return clean


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a temporary file next to ``path``, sync it to disk and rename it."""
    with replacing(path) as temporary:
        write(temporary)
        sync(temporary)


def rename_by_hash(weights: Path, name: str) -> Path:
    """Rename ``backbone.pt`` and its two other files to ``NAME-HASH``; return its new path.

    The hash is the first 8 hexadecimal digits of the SHA-256 of ``weights``, as in torch.hub.
    """
    stem = f"{name}-{hashlib.sha256(weights.read_bytes()).hexdigest()[:8]}"
    for kind in (SAFETENSORS, META):
        os.replace(weights.with_name(kind), weights.with_name(stem + Path(kind).suffix))
    return weights.replace(weights.with_name(stem + weights.suffix))
