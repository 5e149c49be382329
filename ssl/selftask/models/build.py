"""From a config's ``backbone`` section to a module."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from selftask.errors import UserError
from selftask.registry import BACKBONES

if TYPE_CHECKING:
    from selftask.config.schema import Component

_TRIED_SIZES = (224, 32)  # pixels


def build_backbone(component: Component, channels: int = 3) -> nn.Module:
    """The backbone of that name and arguments: images (B, C, H, W) -> features (B, ``embed_dim``).

    Raises UserError if the name or the arguments are wrong, it cannot be made for so many
    ``channels`` (C), or it makes no such features.
    """
    config = BACKBONES[component.name](**component.args)
    if channels != 3 and "channels" not in inspect.signature(config.build).parameters:
        raise UserError(
            f"backbone {component.name!r} takes 3 channels, the data have {channels}: its build() "
            "has no argument `channels`"
        )
    model: nn.Module = config.build() if channels == 3 else config.build(channels=channels)
    if not isinstance(getattr(model, "embed_dim", None), int):
        model.embed_dim = _count_features(model, component.name, channels)  # type: ignore[assignment]
    return model


def embed_dim(backbone: nn.Module) -> int:
    """The number of features of a backbone made by ``build_backbone``."""
    dim = backbone.embed_dim
    assert isinstance(dim, int)
    return dim


@torch.no_grad()
def _count_features(model: nn.Module, name: str, channels: int) -> int:
    """Pass one blank image through the model and look; its state and mode stay what they were."""
    training = [module.training for module in model.modules()]
    model.eval()
    errors = []
    try:
        for size in _sizes(model):
            try:
                features = model(torch.zeros(1, channels, size, size))
            except (RuntimeError, AssertionError, ValueError) as error:
                errors.append(f"{size} x {size} pixels: {error}")
                continue
            if isinstance(features, Tensor) and features.ndim == 2:
                return features.shape[1]
            shape = (
                tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            )
            raise UserError(
                f"backbone {name!r} must map images (B, {channels}, H, W) to features (B, E), but "
                f"returns {shape} for one image; pool its output to one vector an image"
            )
    finally:
        for module, mode in zip(model.modules(), training, strict=True):
            module.training = mode
    raise UserError(
        f"backbone {name!r} has no integer attribute embed_dim and fails on a blank image "
        f"({'; '.join(errors)}); give it an embed_dim"
    )


def _sizes(model: nn.Module) -> tuple[int, ...]:
    """Image sizes worth trying, the one that a timm model names first."""
    config = getattr(model, "default_cfg", None)
    if isinstance(config, dict) and "input_size" in config:
        return (config["input_size"][-1], *_TRIED_SIZES)
    return _TRIED_SIZES
