"""Vision transformers: timm's VisionTransformer with timm's parameter names, without classifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from selftask.registry import register_backbone

if TYPE_CHECKING:
    from torch import nn


@register_backbone("vit_micro")
@dataclass(frozen=True, kw_only=True)
class ViTMicro:
    """For 32 x 32 pixels and two cores: 4 blocks of width 96, 3 heads, 0.5 M parameters."""

    img_size: int = 32  # pixels
    patch_size: int = 4  # pixels
    depth: int = 4  # blocks
    pool: Literal["token", "avg"] = "token"  # what becomes the feature: class token or mean patch
    class_token: bool = True
    drop_path: float = 0.0  # rate in the last block; grows linearly from 0
    dynamic_img_size: bool = False  # other sizes too, positions interpolated: for multi-crop

    def problems(self, config: dict[str, Any]) -> Any:
        if self.img_size % self.patch_size:
            yield (
                f"backbone.img_size: {self.img_size} pixels are no whole number of patches of "
                f"{self.patch_size}; try {self.img_size // self.patch_size * self.patch_size}"
            )
        if self.pool == "token" and not self.class_token:
            yield "backbone.pool: 'token' needs class_token: true; use 'avg' without"

    def build(self, channels: int = 3) -> nn.Module:
        return _build(self, channels, embed_dim=96, num_heads=3)


@register_backbone("vit_tiny")
@dataclass(frozen=True, kw_only=True)
class ViTTiny:
    """ViT-Ti: 12 blocks of width 192, 3 heads, 5.5 M parameters."""

    img_size: int = 224  # pixels
    patch_size: int = 16  # pixels
    depth: int = 12  # blocks
    pool: Literal["token", "avg"] = "token"  # what becomes the feature: class token or mean patch
    class_token: bool = True
    drop_path: float = 0.0  # rate in the last block; grows linearly from 0
    dynamic_img_size: bool = False  # other sizes too, positions interpolated: for multi-crop

    def problems(self, config: dict[str, Any]) -> Any:
        if self.img_size % self.patch_size:
            yield (
                f"backbone.img_size: {self.img_size} pixels are no whole number of patches of "
                f"{self.patch_size}; try {self.img_size // self.patch_size * self.patch_size}"
            )
        if self.pool == "token" and not self.class_token:
            yield "backbone.pool: 'token' needs class_token: true; use 'avg' without"

    def build(self, channels: int = 3) -> nn.Module:
        return _build(self, channels, embed_dim=192, num_heads=3)


@register_backbone("vit_small")
@dataclass(frozen=True, kw_only=True)
class ViTSmall:
    """ViT-S: 12 blocks of width 384, 6 heads, 22 M parameters."""

    img_size: int = 224  # pixels
    patch_size: int = 16  # pixels
    depth: int = 12  # blocks
    pool: Literal["token", "avg"] = "token"  # what becomes the feature: class token or mean patch
    class_token: bool = True
    drop_path: float = 0.0  # rate in the last block; grows linearly from 0
    dynamic_img_size: bool = False  # other sizes too, positions interpolated: for multi-crop

    def problems(self, config: dict[str, Any]) -> Any:
        if self.img_size % self.patch_size:
            yield (
                f"backbone.img_size: {self.img_size} pixels are no whole number of patches of "
                f"{self.patch_size}; try {self.img_size // self.patch_size * self.patch_size}"
            )
        if self.pool == "token" and not self.class_token:
            yield "backbone.pool: 'token' needs class_token: true; use 'avg' without"

    def build(self, channels: int = 3) -> nn.Module:
        return _build(self, channels, embed_dim=384, num_heads=6)


@register_backbone("vit_base")
@dataclass(frozen=True, kw_only=True)
class ViTBase:
    """ViT-B: 12 blocks of width 768, 12 heads, 86 M parameters."""

    img_size: int = 224  # pixels
    patch_size: int = 16  # pixels
    depth: int = 12  # blocks
    pool: Literal["token", "avg"] = "token"  # what becomes the feature: class token or mean patch
    class_token: bool = True
    drop_path: float = 0.0  # rate in the last block; grows linearly from 0
    dynamic_img_size: bool = False  # other sizes too, positions interpolated: for multi-crop

    def problems(self, config: dict[str, Any]) -> Any:
        if self.img_size % self.patch_size:
            yield (
                f"backbone.img_size: {self.img_size} pixels are no whole number of patches of "
                f"{self.patch_size}; try {self.img_size // self.patch_size * self.patch_size}"
            )
        if self.pool == "token" and not self.class_token:
            yield "backbone.pool: 'token' needs class_token: true; use 'avg' without"

    def build(self, channels: int = 3) -> nn.Module:
        return _build(self, channels, embed_dim=768, num_heads=12)


def _build(
    config: ViTMicro | ViTTiny | ViTSmall | ViTBase,
    channels: int,
    *,
    embed_dim: int,
    num_heads: int,
) -> nn.Module:
    from timm.models import VisionTransformer  # costs seconds, hence only when used

    model: nn.Module = VisionTransformer(
        img_size=config.img_size,
        patch_size=config.patch_size,
        in_chans=channels,
        depth=config.depth,
        embed_dim=embed_dim,
        num_heads=num_heads,
        global_pool=config.pool,
        class_token=config.class_token,
        fc_norm=False,  # features are normalised before pooling: one layout for both pools
        drop_path_rate=config.drop_path,
        dynamic_img_size=config.dynamic_img_size,
        num_classes=0,
    )
    return model
