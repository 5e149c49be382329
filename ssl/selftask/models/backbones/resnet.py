"""torchvision's ResNets with torchvision's parameter names, without the classifier.

``stem="cifar"`` is the stem for images of 32 pixels in SimCLR's appendix B.9: a 3 x 3 convolution
of stride 1 instead of the 7 x 7 one of stride 2, and no max-pooling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from selftask.config.fields import setting
from selftask.models.backbones.norms import WithNorm
from selftask.registry import register_backbone

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class _ResNet(WithNorm):
    """Options common to all depths."""

    offers = ("dense", "hidden", "sparse")
    architecture: ClassVar[str]  # name in torchvision

    stem: Literal["imagenet", "cifar"] = "imagenet"
    """First layers: imagenet (for 224 pixels), or cifar (a 3 x 3 convolution, for 32 pixels)."""
    stem_padding: int = setting(1, min=0, max=100)
    """Padding of the cifar stem, in pixels; 2, as in solo-learn, gives 34 x 34 for 32 x 32."""
    zero_init_residual: bool = False
    """Whether each block starts as the identity."""

    def tiny(self) -> dict[str, Any]:
        return {"name": "small_resnet", "width": 8}

    def in_timm(self) -> tuple[str, dict[str, Any]]:
        """Return the name and arguments of timm's model, which has the ``imagenet`` stem."""
        return self.architecture, {}

    def build(self, channels: int = 3) -> nn.Module:
        """Build the torchvision model; ``fc`` is an identity, without keys in the state dict."""
        import torchvision  # slow to import
        from torch import nn

        model: Any = torchvision.models.get_model(
            self.architecture,
            weights=None,
            zero_init_residual=self.zero_init_residual,
            norm_layer=self.norm_layer,
        )
        model.embed_dim = model.fc.in_features
        model.fc = nn.Identity()
        cifar, first = self.stem == "cifar", model.conv1
        if cifar:
            model.maxpool = nn.Identity()
            first = nn.Conv2d(
                channels, first.out_channels, 3, stride=1, padding=self.stem_padding, bias=False
            )
        elif channels != 3:
            first = nn.Conv2d(channels, first.out_channels, 7, stride=2, padding=3, bias=False)
        if first is not model.conv1:
            nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")
            model.conv1 = first
        return cast(nn.Module, model)


@register_backbone("resnet18")
@dataclass(frozen=True, kw_only=True)
class ResNet18(_ResNet):
    """ResNet-18, 11 M parameters, 512 features."""

    architecture = "resnet18"


@register_backbone("resnet34")
@dataclass(frozen=True, kw_only=True)
class ResNet34(_ResNet):
    """ResNet-34, 21 M parameters, 512 features."""

    architecture = "resnet34"


@register_backbone("resnet50")
@dataclass(frozen=True, kw_only=True)
class ResNet50(_ResNet):
    """ResNet-50, 24 M parameters, 2048 features."""

    architecture = "resnet50"


@register_backbone("resnet101")
@dataclass(frozen=True, kw_only=True)
class ResNet101(_ResNet):
    """ResNet-101, 43 M parameters, 2048 features."""

    architecture = "resnet101"


@register_backbone("resnet152")
@dataclass(frozen=True, kw_only=True)
class ResNet152(_ResNet):
    """ResNet-152, 58 M parameters, 2048 features."""

    architecture = "resnet152"
