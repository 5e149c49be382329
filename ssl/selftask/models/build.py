"""From a config's ``backbone`` section to a module."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selftask.config.checks import grid, requirements
from selftask.errors import ConfigError, UserError
from selftask.models.eval_mode import in_eval_mode
from selftask.models.features.extract import offers
from selftask.registry import BACKBONES, METHODS

if TYPE_CHECKING:
    from selftask.config.schema import Component, Config

LIBRARIES = ("timm", "torchvision")  # backbones of these are known by the names there
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


def check_backbone(config: Config, channels: int) -> None:
    """Raise UserError for a model of timm or torchvision that ``config`` cannot train.

    Its name, arguments and sizes are only known by building it, which on the meta device takes
    neither memory nor time: so a run that cannot start says so before its folder is made.
    """
    if config.backbone.name not in LIBRARIES:
        return
    try:
        with torch.device("meta"):
            backbone = build_backbone(config.backbone, channels)
    except (NotImplementedError, RuntimeError):  # its first weights need data: built for real later
        return
    check_sizes(backbone, config)
    check_offers(backbone, config)


def check_offers(backbone: nn.Module, config: Config) -> None:
    """Raise ConfigError or UserError for a built backbone that the method cannot train."""
    if problems := list(requirements.of_backbone(config, offers(backbone))):
        raise ConfigError(problems)
    METHODS[config.method.name].check_backbone(backbone)


def check_sizes(backbone: nn.Module, config: Config) -> None:
    """Raise ConfigError for views that a library's transformer, built, turns out not to take.

    Its size is known only now; that of ours is in the config, and looked at with it.
    """
    key, library = ("backbone", "args"), config.backbone.name
    patches: Any = getattr(backbone, "patch_embed", None)
    image_size: Any = getattr(backbone, "image_size", None)
    if library == "timm" and getattr(patches, "strict_img_size", False):
        dynamic = "dynamic_img_size" in inspect.signature(type(backbone)).parameters
        problems = grid.other_sizes(config, key, patches.img_size[0], dynamic=dynamic)
    elif library == "timm" and getattr(patches, "dynamic_img_pad", None) is False:
        problems = grid.undivided_sizes(config, patches.patch_size[0])
    elif library == "torchvision" and image_size is not None:
        problems = grid.other_sizes(config, key, image_size, size="image_size", dynamic=False)
    else:
        return
    if texts := [text for _, text in problems]:
        raise ConfigError(texts)


def check_images(backbone: nn.Module, images: Tensor) -> None:
    """Raise UserError for images (B, C, H, W) of a size that a vision transformer does not take."""
    height, width = images.shape[-2:]
    patches: Any = getattr(backbone, "patch_embed", None)
    taken: Any = getattr(backbone, "image_size", None)  # of torchvision's
    if getattr(patches, "strict_img_size", False):
        taken = patches.img_size
    name, shown = type(backbone).__name__, f"eval.transforms gives images of {height}x{width}"
    if taken is not None:
        rows, columns = (taken, taken) if isinstance(taken, int) else taken
        if (height, width) != (rows, columns):
            raise UserError(
                f"{shown} pixels, and the backbone (a {name}) takes those of {rows}x{columns}; "
                f"image_size={height} interpolates its positions, or end with a crop of {rows}"
            )
    elif getattr(patches, "dynamic_img_pad", None) is False:
        patch = patches.patch_size[0]
        if height % patch or width % patch:
            raise UserError(
                f"{shown} pixels, which cannot be divided into the patches of {patch} pixels of "
                f"the backbone (a {name}); {grid.multiples(height, patch)}"
            )


def embed_dim(backbone: nn.Module) -> int:
    """The number of features of a backbone made by ``build_backbone``."""
    dim = backbone.embed_dim
    assert isinstance(dim, int)
    return dim


@torch.no_grad()
def _count_features(model: nn.Module, name: str, channels: int) -> int:
    """Pass one blank image through the model and look; its state and mode stay what they were."""
    errors = []
    for size in _sizes(model):
        try:
            with in_eval_mode(model):
                features = model(torch.zeros(1, channels, size, size))
        except (RuntimeError, AssertionError, ValueError) as error:
            errors.append(f"{size} x {size} pixels: {error}")
            continue
        if isinstance(features, Tensor) and features.ndim == 2:
            return features.shape[1]
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise UserError(
            f"backbone {name!r} must map images (B, {channels}, H, W) to features (B, E), but "
            f"returns {shape} for one image; pool its output to one vector an image"
        )
    raise UserError(
        f"backbone {name!r} has no integer attribute embed_dim and fails on a blank image "
        f"({'; '.join(errors)}); give it an embed_dim"
    )


def _sizes(model: nn.Module) -> tuple[int, ...]:
    """Image sizes worth trying, the one that a model of timm or torchvision names first."""
    image_size = getattr(model, "image_size", None)
    if isinstance(image_size, int):
        return (image_size, *_TRIED_SIZES)
    config = getattr(model, "default_cfg", None)
    if isinstance(config, dict) and "input_size" in config:
        return (config["input_size"][-1], *_TRIED_SIZES)
    return _TRIED_SIZES
