"""Build a backbone from the ``backbone`` section of a config."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from selftask.config.checks import grid, requirements
from selftask.config.extensions.user_code import module_initialized, source_of
from selftask.config.library_names import LIBRARIES
from selftask.config.schema import Component, Config
from selftask.errors import ConfigError, UserError
from selftask.models.eval_mode import in_eval_mode
from selftask.models.features.extract import adapter_of, fixed_size, interpolates, offers
from selftask.models.weights.lora import adapt
from selftask.registry import BACKBONES, METHODS

_TRIED_SIZES = (224, 32)  # pixels


def build_backbone(component: Component, channels: int = 3) -> nn.Module:
    """Build a backbone: images (B, C, H, W) -> features (B, ``embed_dim``).

    Args:
        component: Name and arguments.
        channels: Channels of the images, C.

    Raises:
        UserError: If the name is unknown, the library rejects an argument, the backbone does not
            support ``channels``, or it has no ``embed_dim`` and does not return such features.
        TypeError: If an argument is not an option of the backbone.
    """
    config = BACKBONES[component.name](**component.args)
    if channels != 3 and "channels" not in inspect.signature(config.build).parameters:
        raise UserError(
            f"backbone {component.name!r} takes 3 channels, the data have {channels}: its build() "
            "has no argument `channels`"
        )
    with module_initialized("super().__init__()"):
        model: nn.Module = config.build() if channels == 3 else config.build(channels=channels)
    return with_embed_dim(model, component.name, channels)


def with_embed_dim(model: nn.Module, name: str, channels: int) -> nn.Module:
    """Return the backbone; set ``embed_dim``, its number of features, unless it is an integer.

    It is also set for models of timm, since a Swin has that of its first stage. The value of other
    models is not checked.

    Args:
        model: Images (B, C, H, W) -> features (B, E).
        name: Name of the backbone, for messages.
        channels: Channels of the images, C.

    Raises:
        UserError: If the model is not a module, if ``embed_dim`` is missing and the model does not
            return features (B, E), or if a model of timm returns scores of classes.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"backbone {name!r}: build returned {model!r}, not an nn.Module")
    if not isinstance(getattr(model, "embed_dim", None), int):
        model.embed_dim = count_features(model, name, channels)  # type: ignore[assignment]
    elif type(model).__module__.startswith("timm."):
        timm_model: Any = model
        width = timm_model.embed_dim = timm_model.head_hidden_size  # of a Swin: of the first stage
        classes = getattr(timm_model.get_classifier(), "out_features", width)
        if classes != width:
            raise UserError(
                f"backbone {name!r} ends with timm's classifier of {classes} classes; create it "
                "with num_classes=0"
            )
    return model


def check_backbone(config: Config, channels: int) -> None:
    """Raise UserError if a timm or torchvision backbone, or ``backbone.lora``, does not fit a run.

    Name, arguments and sizes can only be checked by building the model. On the meta device this is
    fast and needs no memory, so errors are reported before the run's folder is created. Other
    backbones without ``lora``, and those that cannot be built on the meta device, are not checked.
    """
    if config.backbone.name not in LIBRARIES and config.backbone.lora is None:
        return
    backbone = build_on_meta(config.backbone, channels)
    if backbone is not None:
        check_sizes(backbone, config)
        check_offers(backbone, config)
        adapt(backbone, config.backbone.lora)


def build_on_meta(component: Component, channels: int) -> nn.Module | None:
    """Build a backbone on the meta device; return None if its initialization does not run there.

    Raises:
        UserError: As ``build_backbone``.
    """
    try:
        with torch.device("meta"):
            return build_backbone(component, channels)
    except UserError as error:
        if isinstance(error.__cause__, TypeError):  # of Tensor.numpy()
            return None
        raise
    except (NotImplementedError, RuntimeError, TypeError):
        return None


def check_offers(backbone: nn.Module, config: Config) -> None:
    """Raise ConfigError or UserError if the method cannot train a built backbone."""
    if hasattr(backbone, "offers") and not hasattr(backbone, "extract"):
        raise UserError(
            f"{source_of(type(backbone))}: {type(backbone).__name__} has an attribute `offers` and "
            "no method extract(images, **options) (docs/methods.md)"
        )
    if problems := list(requirements.of_backbone(config, offers(backbone))):
        raise ConfigError(problems)
    METHODS[config.method.name].check_backbone(backbone)


def check_sizes(backbone: nn.Module, config: Config) -> None:
    """Raise ConfigError if a library's transformer does not accept the size of the views.

    Its image size is known only after building. Selftask's own backbones are checked with the
    config.
    """
    key, library = ("backbone", "args"), config.backbone.name
    patches: Any = getattr(backbone, "patch_embed", None)
    size = fixed_size(backbone)
    if library in LIBRARIES and size is not None:
        problems = grid.other_sizes(
            config,
            key,
            size[0],
            size="img_size" if library == "timm" else "image_size",
            dynamic="dynamic_img_size" in inspect.signature(type(backbone)).parameters,
            patch=adapter_of(backbone).patch_size[0] if interpolates(backbone) else None,
        )
    elif library == "timm" and getattr(patches, "dynamic_img_pad", None) is False:
        problems = grid.undivided_sizes(config, patches.patch_size[0])
    else:
        return
    if texts := [text for _, text in problems]:
        raise ConfigError(texts)


def check_images(backbone: nn.Module, images: Tensor) -> None:
    """Raise UserError if a vision transformer does not accept the size of images (B, C, H, W)."""
    height, width = images.shape[-2:]
    patches: Any = getattr(backbone, "patch_embed", None)
    size = fixed_size(backbone)
    name, shown = type(backbone).__name__, f"eval.transforms gives images of {height}x{width}"
    if size is not None:
        rows, columns = size
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
    """Return the number of features of a backbone made by ``build_backbone``."""
    dim = backbone.embed_dim
    assert isinstance(dim, int)
    return dim


@torch.no_grad()
def count_features(model: nn.Module, name: str, channels: int) -> int:
    """Return the number of features E for a blank image; the model's state and mode are unchanged.

    Args:
        model: Images (B, C, H, W) -> features (B, E).
        name: Name of the backbone, for messages.
        channels: Channels of the images, C.

    Raises:
        UserError: If the model fails on a blank image or does not return features (B, E).
    """
    errors = []
    device = next((tensor.device for tensor in model.parameters()), None)
    for size in _sizes(model):
        try:
            with in_eval_mode(model):
                features = model(torch.zeros(1, channels, size, size, device=device))
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
    """Return image sizes (pixels) to try; first the one declared by a timm or torchvision model."""
    image_size = getattr(model, "image_size", None)
    if isinstance(image_size, int):
        return (image_size, *_TRIED_SIZES)
    config = getattr(model, "default_cfg", None)
    if isinstance(config, dict) and "input_size" in config:
        return (config["input_size"][-1], *_TRIED_SIZES)
    return _TRIED_SIZES
