"""Resolutions of a convolutional network."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from selftask.models.eval_mode import in_eval_mode
from selftask.models.features.extract import adapter_of, extract


class Level(NamedTuple):
    """A resolution of a convolutional network."""

    layer: int
    """Number of the last hidden layer with this resolution."""
    width: int
    """Number of channels."""
    stride: int
    """Pixels between two positions."""


@torch.no_grad()
def levels_of(backbone: nn.Module, channels: int) -> list[Level]:
    """Return the resolutions of a backbone that offers ``"hidden"``, from coarse to fine.

    Args:
        backbone: Backbone whose adapter has a ``patch_size``.
        channels: Channels of its images.
    """
    adapter = adapter_of(backbone)
    height, width = (2 * side for side in adapter.patch_size)
    image = next(backbone.parameters()).new_zeros(1, channels, height, width)
    with in_eval_mode(backbone):
        hidden = extract(backbone, image, layers=range(adapter.num_layers)).hidden
    levels: dict[int, Level] = {}
    for layer, tokens in sorted(hidden.items()):
        stride = height // tokens.map.shape[2]
        levels[stride] = Level(layer, tokens.patches.shape[2], stride)
    return sorted(levels.values(), key=lambda level: -level.stride)
