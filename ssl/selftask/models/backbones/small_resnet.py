"""A small ResNet for images of 32 x 32 pixels; trains on two CPU cores in a minute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.config.fields import setting
from selftask.models.backbones.norms import WithNorm
from selftask.models.features.sparse import VISIBLE
from selftask.models.features.tokens import Features, from_map
from selftask.registry import register_backbone


@register_backbone("small_resnet")
@dataclass(frozen=True, kw_only=True)
class SmallResNetConfig(WithNorm):
    """Small residual network for 32 x 32 images: a 3 x 3 stem and three stages."""

    offers = ("dense", "hidden", "sparse")

    width: int = setting(32, min=1, max=10000)
    """Channels of the stem; stages have 1, 2 and 4 times as many."""
    blocks: int = setting(1, min=1, max=1000)
    """Residual blocks in each stage."""
    stem_stride: int = setting(2, min=1, max=32)
    """Stride of the stem; 1 has twice the resolution of 2, and costs four times as much."""

    def tiny(self) -> dict[str, Any]:
        return {"name": "small_resnet", "width": 8}

    def build(self, channels: int = 3) -> nn.Module:
        return SmallResNet(
            self.width,
            blocks=self.blocks,
            stem_stride=self.stem_stride,
            channels=channels,
            norm=self.norm_layer,
        )


class SmallResNet(nn.Module):
    """A stem, three stages that each halve the resolution, and average pooling: (B, 4 * width).

    Unlike in ResNet-18 with the CIFAR stem, the first stage also halves the resolution, and so does
    a stem with stride 2. At full resolution these layers would take most of the computation. The
    data pipeline gives images in ``torch.channels_last``, which is twice as fast on CPUs.

    Args:
        width: Channels of the stem; stages have 1, 2 and 4 times as many.
        blocks: Residual blocks in each stage.
        stem_stride: Stride of the stem.
        channels: Channels of the images.
        norm: Function that builds the normalization for a given number of channels.
    """

    offers = ("dense", "hidden", "sparse")

    def __init__(
        self,
        width: int,
        *,
        blocks: int,
        stem_stride: int,
        channels: int = 3,
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        self.embed_dim = 4 * width
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride=stem_stride, padding=1, bias=False),
            norm(width),
            nn.ReLU(inplace=True),
        )
        stages, channels = [], width
        for stage_width in (width, 2 * width, 4 * width):
            for block in range(blocks):
                stride = 2 if block == 0 else 1
                stages.append(_Residual(channels, stage_width, stride=stride, norm=norm))
                channels = stage_width
        self.stages = nn.Sequential(*stages)
        self.num_layers = 1 + len(stages)
        self.stride = 8 * stem_stride
        self.patch_size = (self.stride, self.stride)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.stages(self.stem(images))  # (B, 4 * width, h, w)
        return features.mean(dim=(2, 3))

    @property
    def layer_modules(self) -> list[nn.Module]:
        """The stem, followed by the blocks."""
        return [self.stem, *self.stages]

    def extract(self, images: Tensor, *, layers: tuple[int, ...] = ()) -> Features:
        """Return pooled features, the last map, and the maps of some layers.

        Args:
            images: (B, C, H, W).
            layers: Numbers of the layers, as in ``layer_modules``.
        """
        x, hidden = images, {}
        for number, part in enumerate(self.layer_modules):
            x = part(x)
            if number in layers:
                hidden[number] = from_map(x)
        pooled = x if VISIBLE.indices is None else VISIBLE.gather(x)
        return Features(pooled.mean(dim=(2, 3)), from_map(x), hidden)


class _Residual(nn.Module):
    """Two 3 x 3 convolutions with a shortcut, which has a 1 x 1 convolution if shapes differ."""

    def __init__(
        self, num_in: int, num_out: int, *, stride: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = norm(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.bn2 = norm(num_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or num_in != num_out:
            self.shortcut = nn.Sequential(
                _PointwiseConv2d(num_in, num_out, 1, stride=stride, bias=False), norm(num_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x), inplace=True)


class _PointwiseConv2d(nn.Conv2d):
    """A 1 x 1 convolution, without bias, of every ``stride``-th pixel.

    Results are bit-identical to those of a strided convolution, whose backward pass corrupts memory
    on CPUs if there are few input channels (oneDNN in torch 2.14, 2 to 8 channels).
    """

    def forward(self, input: Tensor) -> Tensor:
        kept = input if self.stride == (1, 1) else F.avg_pool2d(input, 1, self.stride)
        return F.conv2d(kept, self.weight)
