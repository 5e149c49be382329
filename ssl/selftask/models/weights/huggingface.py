"""Export of a backbone for Hugging Face: a folder that ``transformers.AutoModel`` and timm load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from selftask.config.schema import Component
from selftask.errors import UserError
from selftask.models.build import build_backbone, embed_dim
from selftask.models.weights.export import check_features, portable_state, write_whole
from selftask.registry import BACKBONES

FOLDER = "huggingface"
_SIZE = 224  # pixels, if neither the transforms nor the backbone have a size
_WHAT = "export: --to huggingface"


def check_huggingface(backbone: nn.Module, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the content of ``config.json``: the equivalent timm model, and its input.

    Args:
        backbone: The backbone.
        facts: Metadata, see ``save_backbone``.

    Raises:
        UserError: If timm has no model with these weights and the same features.
    """
    architecture, channels = Component(**facts["architecture"]), facts.get("channels", 3)
    built = BACKBONES[architecture.name](**architecture.args)
    if not hasattr(built, "in_timm"):
        raise UserError(
            f"{_WHAT}: {architecture.name} is no model of timm; transformers loads backbones of "
            "timm, vit_* and resnet*. --to safetensors writes the weights alone"
        )
    try:
        model, args = built.in_timm()
        theirs = build_backbone(
            Component(name="timm", args={"model": model, "args": args}), channels
        )
    except UserError as error:
        raise UserError(f"{_WHAT}: {str(error).removeprefix('backbone.model: ')}") from error
    size = facts.get("input_size") or args.get("img_size") or _SIZE
    check_features(backbone, theirs, what=f"{_WHAT}: timm's {model}", shape=(channels, size, size))
    known = getattr(theirs, "pretrained_cfg", {})
    return {
        "architecture": model,
        "num_classes": 0,
        "num_features": embed_dim(backbone),
        "model_args": {**args, **({} if channels == 3 else {"in_chans": channels})},
        "pretrained_cfg": {
            **_input(facts, channels, size),
            "num_classes": 0,
            "first_conv": known.get("first_conv"),
            "classifier": known.get("classifier"),
        },
        "selftask": facts,
    }


def save_huggingface(backbone: nn.Module, folder: Path, config: dict[str, Any]) -> Path:
    """Write ``huggingface/config.json`` and ``model.safetensors``; return the folder.

    It has the layout of timm's models on the Hugging Face Hub.

    Args:
        backbone: The backbone.
        folder: Folder in which ``huggingface`` is created.
        config: Result of ``check_huggingface``.
    """
    from safetensors.torch import save  # not save_file: its error on a full disk is not an OSError

    out = folder / FOLDER
    out.mkdir(exist_ok=True)
    weights, text = save(portable_state(backbone), {"format": "pt"}), json.dumps(config, indent=2)
    write_whole(out / "model.safetensors", lambda path: path.write_bytes(weights))
    write_whole(out / "config.json", lambda path: path.write_text(text + "\n", encoding="utf-8"))
    return out


def _input(facts: dict[str, Any], channels: int, size: int) -> dict[str, Any]:
    """Return timm's description of the evaluation's transforms."""
    resize = next((t for t in facts.get("transforms", []) if t["name"] == "resize"), {"size": size})
    normalization = facts.get("normalization") or {}
    return {
        "input_size": [channels, size, size],
        "fixed_input_size": False,
        "interpolation": resize.get("interpolation", "bilinear"),
        "crop_pct": min(1.0, size / resize["size"]),
        "crop_mode": "center",
        "mean": normalization.get("mean") or [0.0] * channels,
        "std": normalization.get("std") or [1.0] * channels,
    }
