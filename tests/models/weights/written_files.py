"""Networks whose weights are written as other frameworks do, and how they write them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn

State = dict[str, Tensor]


def resnet(name: str = "resnet18") -> nn.Module:
    model = torchvision.models.get_model(name)
    model.fc = nn.Identity()
    return model


def vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32, num_classes=0)


def prefixed(prefix: str, state: State) -> State:
    return {prefix + key: value for key, value in state.items()}


def zeroed(state: State) -> State:
    return {key: torch.zeros_like(value) for key, value in state.items()}


def write(content: Any, path: Path) -> None:
    if path.suffix == ".pkl":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=path.suffix != ".torch")


def to_detectron2(state: State) -> State:
    """The rule of MoCo's and VISSL's converters, from torchvision to detectron2."""
    made = {}
    for key, value in state.items():
        new = key if "layer" in key else f"stem.{key}"
        for number in (1, 2, 3, 4):
            new = new.replace(f"layer{number}", f"res{number + 1}")
        for number in (1, 2, 3):
            new = new.replace(f"bn{number}", f"conv{number}.norm")
        new = new.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
        if "num_batches" not in key:  # frozen norms have no counter
            made[f"backbone.bottom_up.{new}"] = value
    return made
