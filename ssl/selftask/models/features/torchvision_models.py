"""torchvision's models: VisionTransformer, and models of stages followed by ``avgpool``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selftask.models.features.adapter import Adapter
from selftask.models.features.tokens import (
    Features,
    Grid,
    Request,
    Tokens,
    from_map,
    from_sequence,
    resample,
)


class TorchvisionViT(Adapter):
    """Adapter of torchvision's VisionTransformer; accepts other image sizes."""

    offers = frozenset({"dense", "hidden", "tokens"})
    interpolates = True
    num_prefix = 1

    def __init__(self, vit: Any) -> None:
        self.vit = vit
        self.num_layers = len(vit.encoder.layers)
        self.patch_size = (vit.patch_size, vit.patch_size)
        side = vit.image_size // vit.patch_size
        self.built_grid = (side, side)
        self.stride = vit.patch_size
        self.mask_dim = vit.hidden_dim

    @staticmethod
    def fits(backbone: Any) -> bool:
        """Return True if a model is torchvision's VisionTransformer."""
        return _is_torchvision(backbone) and hasattr(backbone, "conv_proj")

    def extract(self, images: Tensor, request: Request) -> Features:
        vit, encoder = self.vit, self.vit.encoder
        grid = self.grid(*images.shape[-2:])
        x = vit.conv_proj(images).flatten(2).transpose(1, 2)  # (B, N, E)
        x = request.replace_masked(x)
        x = torch.cat([vit.class_token.expand(len(x), -1, -1), x], dim=1)  # (B, 1 + N, E)
        x = encoder.dropout(x + self._positions(grid))
        hidden = {}
        for number, layer in enumerate(encoder.layers):
            x = layer(x)
            if number in request.layers:
                hidden[number] = from_sequence(x, 1, grid)
        x = encoder.ln(x)
        return Features(vit.heads(x[:, 0]), from_sequence(x, 1, grid), hidden)

    def normalized(self, hidden: Tokens) -> Tokens:
        return hidden.map_sequence(self.vit.encoder.ln)

    def layer(self, number: int) -> nn.Module:
        return self.vit.encoder.layers[number]

    @property
    def positions(self) -> Tensor:
        return self.vit.encoder.pos_embedding

    def _positions(self, grid: Grid) -> Tensor:
        if grid == self.built_grid:
            return self.positions
        return resample(self.positions, self.built_grid, grid, num_prefix=1)


class TorchvisionStages(Adapter):
    """Adapter of torchvision models with stages: ResNet, ConvNeXt, Swin, VGG and others.

    Layers are numbered as in timm for a ResNet (0 is the stem), as the stem (0) and the stages of
    ``trunk_output`` for a RegNet, and as children of ``features`` otherwise. A Swin supports mask
    tokens. A ResNet supports sparse encoding: its convolutions do not see hidden patches.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.stages = _stages(model)
        self.num_layers = len(self.stages)
        self.is_swin = self.channels_last = hasattr(model, "permute")  # NHWC until ``permute``
        offers = {"dense", "hidden"}
        if self.is_swin:
            offers.add("tokens")
            embed = model.features[0][0]
            self.patch_size, self.mask_dim = embed.kernel_size, embed.out_channels
            self.stride = embed.kernel_size[0] * 2 ** (self.num_layers // 2 - 1)  # patch merging
        elif hasattr(model, "layer4"):
            offers.add("sparse")
            pooling = getattr(model.maxpool, "stride", 1)  # the cifar stem has none
            self.stride = model.conv1.stride[0] * pooling * 8
            self.patch_size = (self.stride, self.stride)
        self.offers = frozenset(offers)

    @staticmethod
    def fits(backbone: Any) -> bool:
        """Return True if a torchvision model has an ``avgpool`` after known stages."""
        return (
            _is_torchvision(backbone)
            and hasattr(backbone, "avgpool")
            and any(hasattr(backbone, name) for name in ("layer4", "features", "trunk_output"))
        )

    def extract(self, images: Tensor, request: Request) -> Features:
        model, x, hidden = self.model, images, {}
        for number, stage in enumerate(self.stages):
            for module in stage:
                x = module(x)
            if number == 0:
                x = request.replace_masked(x)
            if number in request.layers:
                hidden[number] = from_map(x.permute(0, 3, 1, 2) if self.is_swin else x)
        if self.is_swin:
            x = model.permute(model.norm(x))
        pooled = model.avgpool(x)
        for name in ("fc", "classifier", "head"):
            if hasattr(model, name):
                last = getattr(model, name)
                flattens = any(isinstance(part, nn.Flatten) for part in last.children())
                pooled = last(pooled if flattens else torch.flatten(pooled, 1))
        return Features(pooled, from_map(x), hidden)

    def layer(self, number: int) -> nn.Module:
        return self.stages[number][-1]


def _is_torchvision(backbone: nn.Module) -> bool:
    """Return True if the forward pass is torchvision's own, not that of a subclass."""
    return type(backbone).forward.__module__.startswith("torchvision.models.")


def _stages(model: Any) -> list[Sequence[nn.Module]]:
    """Return the modules of each stage, in calling order."""
    if hasattr(model, "layer4"):
        stem = (model.conv1, model.bn1, model.relu)
        first = (model.maxpool, model.layer1)
        return [stem, first, (model.layer2,), (model.layer3,), (model.layer4,)]
    if hasattr(model, "trunk_output"):
        return [(model.stem,), *((stage,) for stage in model.trunk_output)]
    return [(stage,) for stage in model.features]
