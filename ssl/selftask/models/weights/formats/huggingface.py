"""Export of a backbone for Hugging Face: a folder that ``transformers.AutoModel`` and timm load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from selftask.config.schema import Component
from selftask.errors import UserError
from selftask.models.build import build_backbone, embed_dim
from selftask.models.features.extract import fixed_size
from selftask.models.weights.export import check_features, portable_state, write_whole
from selftask.registry import BACKBONES

FOLDER = "huggingface"
_SIZE = 224  # pixels, if neither the model nor the transforms have a size
_WHAT = "export: --to huggingface"


def describe_for_huggingface(backbone: nn.Module, facts: dict[str, Any]) -> dict[str, Any]:
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
            f"{_WHAT}: only backbones timm:NAME, vit_* and resnet* can be loaded by transformers, "
            f"and this is {architecture.name}; --to safetensors writes the weights alone"
        )
    try:
        name, args = built.in_timm()
        model = build_backbone(Component(name="timm", args={"model": name, "args": args}), channels)
    except UserError as error:
        raise UserError(f"{_WHAT}: {str(error).removeprefix('backbone.model: ')}") from error
    size = _side(model, facts)
    check_features(backbone, model, subject=f"{_WHAT}: timm's {name}", shape=(channels, size, size))
    of_timm = getattr(model, "pretrained_cfg", {})
    return {
        "architecture": name,
        "num_classes": 0,
        "num_features": embed_dim(backbone),
        "model_args": {**args, **({} if channels == 3 else {"in_chans": channels})},
        "pretrained_cfg": {
            **_preprocessing(facts, channels, size),
            "num_classes": 0,
            "first_conv": of_timm.get("first_conv"),
            "classifier": of_timm.get("classifier"),
        },
        "selftask": facts,
    }


def preprocessing_problem(config: dict[str, Any]) -> str | None:
    """Return how the preprocessing of ``config.json`` differs from the evaluation's, or None.

    ``config.json`` can only describe a resize of the shorter side, a crop of at most this size and
    ``normalize``.

    Args:
        config: Result of ``describe_for_huggingface``.
    """
    facts, size = config["selftask"], config["pretrained_cfg"]["input_size"][-1]
    sizes = [
        (t["name"], t.get("size"))
        for t in facts.get("transforms") or ()
        if t["name"] != "normalize"
    ]
    if not sizes:
        return f"images of other sizes than {size} are resized; in eval.transforms they are not"
    names = [name for name, _ in sizes]
    if names == ["resize", "center_crop"] and sizes[0][1] >= sizes[1][1] == size:
        return None
    return (
        f"resize, center_crop of {size} and normalize, and eval.transforms has {', '.join(names)}"
    )


def save_huggingface(backbone: nn.Module, folder: Path, config: dict[str, Any]) -> Path:
    """Write ``huggingface/config.json`` and ``model.safetensors``; return the folder.

    It has the layout of timm's models on the Hugging Face Hub.

    Args:
        backbone: The backbone.
        folder: Folder in which ``huggingface`` is created.
        config: Result of ``describe_for_huggingface``.
    """
    from safetensors.torch import save  # not save_file: its error on a full disk is not an OSError

    out = folder / FOLDER
    out.mkdir(exist_ok=True)
    weights, text = save(portable_state(backbone), {"format": "pt"}), json.dumps(config, indent=2)
    write_whole(out / "model.safetensors", lambda path: path.write_bytes(weights))
    write_whole(out / "config.json", lambda path: path.write_text(text + "\n", encoding="utf-8"))
    return out


def _side(model: Any, facts: dict[str, Any]) -> int:
    """Return the height and width of images: the model's, if fixed, or those of the evaluation."""
    fixed = fixed_size(model)
    if fixed is not None:
        return fixed[0]
    of_timm: int = getattr(model, "pretrained_cfg", {}).get("input_size", (_SIZE,))[-1]
    return facts.get("input_size") or of_timm


def _preprocessing(facts: dict[str, Any], channels: int, size: int) -> dict[str, Any]:
    """Return timm's description of the evaluation's transforms."""
    resize = next(
        (t for t in facts.get("transforms") or () if t["name"] == "resize"), {"size": size}
    )
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
