"""CLIP and SigLIP as Hugging Face's transformers save them: weights, tokenizer and processor."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selftask.errors import UserError, explained
from selftask.files.paths import is_file
from selftask.models.text import ImageTextModel

KINDS = ("clip", "siglip")
_NAMES = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # of Pillow's filters


def is_image_text_folder(folder: Path) -> bool:
    """Return whether a folder has the ``config.json`` of CLIP or SigLIP."""
    file = folder / "config.json"
    try:
        return is_file(file) and json.loads(file.read_text("utf-8"))["model_type"] in KINDS
    except (ValueError, LookupError, TypeError):
        return False


def open_image_text(folder: Path) -> tuple[ImageTextModel, dict[str, Any]]:
    """Return the model in a folder, in eval mode, and its channels, transforms and method.

    These are as in the metadata of ``open_model``. Nothing is downloaded, and no code in the folder
    is run. Images are resized so that the shorter side fits and cropped at the center; SigLIP's own
    processor changes the aspect ratio.

    Raises:
        UserError: If transformers is missing, or cannot load the folder.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UserError(f"{folder}: needs the package transformers: pip install transformers")
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

    kwargs: Any = {"local_files_only": True, "trust_remote_code": False}
    with explained(f"{folder}: transformers cannot load it"):
        model = AutoModel.from_pretrained(folder, dtype=torch.float32, **kwargs).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, **kwargs)
        processor = AutoImageProcessor.from_pretrained(folder, **kwargs)
    length = model.config.text_config.max_position_embeddings

    def tokenize(texts: Sequence[str]) -> Tensor:
        return tokenizer(
            list(texts),
            padding="max_length",
            truncation=True,
            max_length=length,
            return_tensors="pt",
        ).input_ids

    images, texts = _Tower(model, "image", "pixel_values"), _Tower(model, "text", "input_ids")
    size = model.config.vision_config.image_size
    transforms = [
        {
            "name": "resize",
            "size": dict(processor.size).get("shortest_edge") or size,
            "interpolation": _NAMES.get(int(processor.resample), "bicubic"),
        },
        {"name": "center_crop", "size": size},
        {"name": "normalize", "mean": list(processor.image_mean), "std": list(processor.image_std)},
    ]
    facts = {"channels": 3, "transforms": transforms, "method": model.config.model_type}
    return ImageTextModel(images, nn.Identity(), texts, tokenize), facts


class _Tower(nn.Module):
    """One input of a model of images and texts -> its projected embedding (N, D)."""

    def __init__(self, model: nn.Module, kind: str, argument: str) -> None:
        super().__init__()
        self.model, self.kind, self.argument = model, kind, argument

    def forward(self, inputs: Tensor) -> Tensor:
        embed = getattr(self.model, f"get_{self.kind}_features")
        return embed(**{self.argument: inputs}).pooler_output
