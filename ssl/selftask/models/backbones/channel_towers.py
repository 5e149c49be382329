"""Several networks, each of which processes some of the channels of an image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selftask.config.fields import setting
from selftask.config.schema import Component
from selftask.errors import UserError
from selftask.models.build import build_backbone, embed_dim
from selftask.models.features.extract import adapter_of, offers, pooled
from selftask.models.features.tokens import Features, Request, Tokens
from selftask.registry import register_backbone


@register_backbone("channel_towers")
@dataclass(frozen=True, kw_only=True)
class ChannelTowersConfig:
    """Backbones that see different channels; their features are concatenated (CMC)."""

    towers: list[Any] = setting(of="backbones")
    """Backbones in the order of the channels, such as ``[resnet18, resnet18]``."""
    channels: list[int] = setting([1, 2], min=1)
    """Number of channels of each tower; their sum is that of the images. ``[1, 2]`` are L and ab of
    images in Lab.
    """

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if len(self.towers) != len(self.channels):
            yield (
                f"backbone.channels: {self.channels}, and there are {len(self.towers)} towers; "
                "give a number for each"
            )

    def tiny(self) -> dict[str, Any]:
        tower = {"name": "small_resnet", "width": 8}
        towers = [tower for _ in self.towers]
        return {"name": "channel_towers", "towers": towers, "channels": self.channels}

    def build(self, channels: int = 3) -> nn.Module:
        if sum(self.channels) != channels:
            raise UserError(
                f"backbone.channels: {self.channels}, of sum {sum(self.channels)}; the data have "
                f"{channels} channels"
            )
        parts = zip(self.towers, self.channels, strict=True)
        built = [build_backbone(Component.from_dict(tower), number) for tower, number in parts]
        return ChannelTowers(built, self.channels)


class ChannelTowers(nn.Module):
    """Concatenated features (B, sum of ``widths``) of networks that each see some channels.

    Hidden layers are numbered tower by tower; there are none unless every tower has some.

    Args:
        towers: Backbones, in the order of the channels.
        channels: Number of channels of each tower, of sum C.
    """

    def __init__(self, towers: Sequence[nn.Module], channels: Sequence[int]) -> None:
        super().__init__()
        self.towers = nn.ModuleList(towers)
        self.channels = list(channels)
        self.widths = [embed_dim(tower) for tower in towers]
        self.embed_dim = sum(self.widths)
        self.offers = frozenset({"hidden"}).intersection(*map(offers, towers))
        self.num_layers = len(self.layer_modules)

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([pooled(*pair) for pair in self._pairs(images)], dim=1)

    def _pairs(self, images: Tensor) -> Iterator[tuple[nn.Module, Tensor]]:
        return zip(self.towers, images.split(self.channels, dim=1), strict=True)

    @property
    def layer_modules(self) -> list[nn.Module]:
        """The modules whose outputs are the hidden layers."""
        adapters = map(adapter_of, self.towers) if self.offers else ()
        return [
            adapter.layer(number) for adapter in adapters for number in range(adapter.num_layers)
        ]

    def extract(self, images: Tensor, *, layers: tuple[int, ...] = ()) -> Features:
        """Return pooled features, the tokens of the last tower, and hidden layers by number.

        Args:
            images: (B, C, H, W).
            layers: Numbers of the layers, as in ``layer_modules``.
        """
        outputs: list[Features] = []
        hidden: dict[int, Tokens] = {}
        first = 0
        for tower, part in self._pairs(images):
            adapter = adapter_of(tower)
            numbers = range(first, first + adapter.num_layers)
            inner = tuple(number - first for number in layers if number in numbers)
            outputs.append(adapter.extract(part, Request(layers=inner)))
            hidden |= {first + number: x for number, x in outputs[-1].hidden.items()}
            first += adapter.num_layers
        features = torch.cat([output.pooled for output in outputs], dim=1)
        return Features(features, outputs[-1].tokens, hidden)
