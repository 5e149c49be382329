"""Vision transformers: timm's VisionTransformer with timm's parameter names, without classifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from selftask.config.fields import setting
from selftask.registry import register_backbone

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class _ViT:
    """Options common to all widths."""

    offers = ("dense", "hidden", "tokens", "subset")
    library = "timm"
    embed_dim: ClassVar[int]
    num_heads: ClassVar[int]

    img_size: int = setting(224, min=1)
    """Height and width of images, in pixels."""
    patch_size: int = 16
    """Height and width of a patch, in pixels."""
    depth: int = setting(12, min=1, max=1000)
    """Number of blocks."""
    pool: Literal["token", "avg"] = "token"
    """Output feature: the class token, or the mean of the patches."""
    class_token: bool = True
    """Whether there is a class token."""
    drop_path: float = setting(0.0, min=0, below=1)
    """Rate of stochastic depth in the last block; it increases linearly from 0 in the first."""
    drop_path_uniform: bool = False
    """Whether all blocks have this rate instead, as in DINOv2."""
    dynamic_img_size: bool = False
    """Whether the exported model also accepts other image sizes."""

    def problems(self, config: dict[str, Any]) -> Any:
        if self.img_size % self.patch_size:
            yield (
                f"backbone.img_size: {self.img_size} pixels cannot be divided into patches of "
                f"{self.patch_size}; try {self.img_size // self.patch_size * self.patch_size}"
            )
        if self.pool == "token" and not self.class_token:
            yield "backbone.pool: 'token' needs class_token: true; use 'avg' without"
        if self.drop_path_uniform and not self.drop_path:
            yield "backbone.drop_path_uniform: true, and backbone.drop_path is 0"

    def tiny(self) -> dict[str, Any]:
        kept = ("pool", "class_token", "drop_path", "drop_path_uniform", "dynamic_img_size")
        size = {"img_size": 32, "patch_size": 4, "depth": 2}
        return {"name": "vit_micro", **size, **{name: getattr(self, name) for name in kept}}

    def build(self, channels: int = 3) -> nn.Module:
        """Build timm's model with random weights; class token as in DeiT, DINO and MAE."""
        from timm.models import VisionTransformer  # slow to import
        from torch import nn

        from selftask.models.dropout import set_uniform_stochastic_depth

        model = VisionTransformer(
            img_size=self.img_size,
            patch_size=self.patch_size,
            in_chans=channels,
            depth=self.depth,
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            global_pool=self.pool,
            class_token=self.class_token,
            fc_norm=False,  # features are normalized before pooling: one layout for both pools
            drop_path_rate=self.drop_path,
            dynamic_img_size=self.dynamic_img_size,
            num_classes=0,
        )
        if self.class_token:
            nn.init.trunc_normal_(model.cls_token, std=0.02)  # timm: 1e-6
        if self.drop_path_uniform:
            set_uniform_stochastic_depth(model, self.drop_path)
        return model


@register_backbone("vit_micro")
@dataclass(frozen=True, kw_only=True)
class ViTMicro(_ViT):
    """For 32 x 32 pixels and two CPU cores: 4 blocks of width 96, 3 heads, 0.5 M parameters."""

    embed_dim, num_heads = 96, 3

    img_size: int = setting(32, min=1)
    """Height and width of images, in pixels."""
    patch_size: int = 4
    """Height and width of a patch, in pixels."""
    depth: int = setting(4, min=1, max=1000)
    """Number of blocks."""


@register_backbone("vit_tiny")
@dataclass(frozen=True, kw_only=True)
class ViTTiny(_ViT):
    """ViT-Ti: 12 blocks of width 192, 3 heads, 5.5 M parameters."""

    embed_dim, num_heads = 192, 3


@register_backbone("vit_small")
@dataclass(frozen=True, kw_only=True)
class ViTSmall(_ViT):
    """ViT-S: 12 blocks of width 384, 6 heads, 22 M parameters."""

    embed_dim, num_heads = 384, 6


@register_backbone("vit_base")
@dataclass(frozen=True, kw_only=True)
class ViTBase(_ViT):
    """ViT-B: 12 blocks of width 768, 12 heads, 86 M parameters."""

    embed_dim, num_heads = 768, 12
