"""torchvision's ResNets with their own parameter names, without the classifier.

``stem="cifar"`` is the one of SimCLR's appendix B.9 for images of 32 pixels: a 3 x 3 convolution
of stride 1 in place of the 7 x 7 one of stride 2, and no max-pooling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from selftask.registry import register_backbone

if TYPE_CHECKING:
    from torch import nn


@register_backbone("resnet18")
@dataclass(frozen=True, kw_only=True)
class ResNet18:
    """ResNet-18, 11 M parameters, 512 features."""

    stem: Literal["imagenet", "cifar"] = "imagenet"
    stem_padding: int = 1  # of the cifar stem; solo-learn's 2 gives 34 x 34 for 32 x 32 pixels
    zero_init_residual: bool = False  # each block starts as the identity

    def build(self, channels: int = 3) -> nn.Module:
        return _build("resnet18", self, channels)


@register_backbone("resnet34")
@dataclass(frozen=True, kw_only=True)
class ResNet34:
    """ResNet-34, 21 M parameters, 512 features."""

    stem: Literal["imagenet", "cifar"] = "imagenet"
    stem_padding: int = 1  # of the cifar stem; solo-learn's 2 gives 34 x 34 for 32 x 32 pixels
    zero_init_residual: bool = False  # each block starts as the identity

    def build(self, channels: int = 3) -> nn.Module:
        return _build("resnet34", self, channels)


@register_backbone("resnet50")
@dataclass(frozen=True, kw_only=True)
class ResNet50:
    """ResNet-50, 24 M parameters, 2048 features."""

    stem: Literal["imagenet", "cifar"] = "imagenet"
    stem_padding: int = 1  # of the cifar stem; solo-learn's 2 gives 34 x 34 for 32 x 32 pixels
    zero_init_residual: bool = False  # each block starts as the identity

    def build(self, channels: int = 3) -> nn.Module:
        return _build("resnet50", self, channels)


@register_backbone("resnet101")
@dataclass(frozen=True, kw_only=True)
class ResNet101:
    """ResNet-101, 43 M parameters, 2048 features."""

    stem: Literal["imagenet", "cifar"] = "imagenet"
    stem_padding: int = 1  # of the cifar stem; solo-learn's 2 gives 34 x 34 for 32 x 32 pixels
    zero_init_residual: bool = False  # each block starts as the identity

    def build(self, channels: int = 3) -> nn.Module:
        return _build("resnet101", self, channels)


@register_backbone("resnet152")
@dataclass(frozen=True, kw_only=True)
class ResNet152:
    """ResNet-152, 58 M parameters, 2048 features."""

    stem: Literal["imagenet", "cifar"] = "imagenet"
    stem_padding: int = 1  # of the cifar stem; solo-learn's 2 gives 34 x 34 for 32 x 32 pixels
    zero_init_residual: bool = False  # each block starts as the identity

    def build(self, channels: int = 3) -> nn.Module:
        return _build("resnet152", self, channels)


def _build(
    name: str, config: ResNet18 | ResNet34 | ResNet50 | ResNet101 | ResNet152, channels: int
) -> nn.Module:
    """The torchvision model of that name; ``fc`` is the identity and so has no keys."""
    import torchvision  # costs seconds, hence only when used
    from torch import nn

    model: Any = torchvision.models.get_model(
        name, weights=None, zero_init_residual=config.zero_init_residual
    )
    model.embed_dim = model.fc.in_features
    model.fc = nn.Identity()
    cifar, first = config.stem == "cifar", model.conv1
    if cifar:
        model.maxpool = nn.Identity()
        first = nn.Conv2d(
            channels, first.out_channels, 3, stride=1, padding=config.stem_padding, bias=False
        )
    elif channels != 3:
        first = nn.Conv2d(channels, first.out_channels, 7, stride=2, padding=3, bias=False)
    if first is not model.conv1:
        nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")
        model.conv1 = first
    return cast(nn.Module, model)
