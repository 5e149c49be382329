"""Vision transformers: timm's VisionTransformer, or its Eva if positions are rotary.

Parameters have timm's names. There is no classifier.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from selftask.config.checks.grid import multiples
from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.registry import register_backbone

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class _ViT:
    """Options common to all widths."""

    offers = ("dense", "hidden", "tokens", "subset", "attention", "groups")
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
    """Rate of stochastic depth in the last block; by default it increases linearly from 0."""
    drop_path_uniform: bool = False
    """Whether all blocks have the rate ``drop_path``, as in DINOv2."""
    dynamic_img_size: bool = False
    """Whether the exported model also accepts other image sizes."""
    positions: Literal["learned", "rope", "rope_capi", "rope_eva"] = "learned"
    """Learned positions, or rotary ones (RoPE): ``rope`` as in DINOv3, ``rope_capi`` as in CAPI,
    ``rope_eva`` as in EVA-02 and timm. With RoPE, keys have no bias.
    """
    rope_shift: float = setting(0.0, min=0)
    """Coordinates, from -1 to 1, are shifted by up to this number in training."""
    rope_jitter: float = setting(1.0, min=1)
    """In training, each axis is scaled by a random factor from 1 / this number to this number."""
    rope_rescale: float = setting(1.0, min=1)
    """In training, both axes are scaled by one random factor from 1 / this number to this number;
    DINOv3: 2.
    """
    registers: int = setting(0, min=0)
    """Number of register tokens; DINOv3: 4, CAPI: 16."""
    layer_scale: float | None = setting(None, above=0)
    """Initial factor of each residual branch (LayerScale), such as 1e-5; null: no factors."""
    swiglu: bool = False
    """Whether blocks have a SwiGLU instead of an MLP, with about as many parameters."""

    def problems(self, config: dict[str, Any]) -> Any:
        if self.img_size % self.patch_size:
            yield (
                f"backbone.img_size: {self.img_size} pixels cannot be divided into patches of "
                f"{self.patch_size}; {multiples(self.img_size, self.patch_size)}"
            )
        if self.pool == "token" and not self.class_token:
            yield "backbone.pool: 'token' needs class_token: true; use 'avg' without"
        if self.drop_path_uniform and not self.drop_path:
            yield "backbone.drop_path_uniform: true, and backbone.drop_path is 0"
        if self.positions != "rope" and self._coordinates():
            yield (
                f"backbone.rope_{next(iter(self._coordinates()))}: only positions: rope has random "
                f"coordinates, and backbone.positions is {self.positions}"
            )
        if self.positions == "rope_capi" and self.registers % 4:
            yield (
                f"backbone.registers: {self.registers} cannot be divided over the four sides of an "
                f"image, as positions: rope_capi does; try {-(-self.registers // 4) * 4}"
            )

    def _coordinates(self) -> dict[str, float]:
        """Return the options of random coordinates that are set, by name."""
        names = {"shift": 0.0, "jitter": 1.0, "rescale": 1.0}
        values = {name: getattr(self, f"rope_{name}") for name in names}
        return {name: value for name, value in values.items() if value != names[name]}

    def tiny(self) -> dict[str, Any]:
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**kept, "name": "vit_micro", "img_size": 32, "patch_size": 4, "depth": 2}

    def build(self, channels: int = 3) -> nn.Module:
        """Build timm's model with random weights.

        The class token is drawn with a standard deviation of 0.02, as in DeiT, DINO and MAE.
        """
        from timm.layers import SwiGLU  # slow to import
        from timm.models import VisionTransformer
        from torch import nn

        from selftask.models.dropout import set_uniform_stochastic_depth

        sizes = {
            **self._sizes(),
            "in_chans": channels,
            "drop_path_rate": self.drop_path,
            "num_classes": 0,
        }
        model: Any
        if self.positions == "learned":
            gated = {"mlp_layer": partial(SwiGLU, align_to=64), "act_layer": nn.SiLU}
            model = VisionTransformer(**sizes, **(gated if self.swiglu else {}), **self._tokens())
        else:
            model = self._rotary(sizes)
        if self.class_token:
            nn.init.trunc_normal_(model.cls_token, std=0.02)  # timm: 1e-6
        if self.drop_path_uniform:
            set_uniform_stochastic_depth(model, self.drop_path)
        return model

    def in_timm(self) -> tuple[str, dict[str, Any]]:
        """Return the name and arguments of timm's model; raise UserError if timm has none."""
        option = {
            "learned": "swiglu: true" if self.swiglu else None,
            "rope": "positions: rope without layer_scale" if self.layer_scale is None else None,
            "rope_capi": "positions: rope_capi",
            "rope_eva": None,
        }[self.positions]
        if option is not None:
            raise UserError(f"timm has no named model with backbone.{option}")
        if self.positions == "learned":
            return "vit_base_patch16_224", {**self._sizes(), **self._tokens()}
        name = "vit_base_patch16_dinov3" if self.positions == "rope" else "eva_giant_patch14_224"
        return name, {**self._sizes(), **self._rotations(), "qkv_bias": True}

    def _sizes(self) -> dict[str, Any]:
        """Return the arguments common to timm's VisionTransformer and Eva."""
        return {
            "img_size": self.img_size,
            "patch_size": self.patch_size,
            "depth": self.depth,
            "embed_dim": self.embed_dim,
            "num_heads": self.num_heads,
            "global_pool": self.pool,
            "class_token": self.class_token,
            "dynamic_img_size": self.dynamic_img_size,
            "init_values": self.layer_scale,
            "mlp_ratio": 8 / 3 if self.swiglu else 4.0,
        }

    def _tokens(self) -> dict[str, Any]:
        """Return the arguments that only timm's VisionTransformer has."""
        return {
            "reg_tokens": self.registers,
            "no_embed_class": self.registers > 0,  # as in DINOv2 with registers
            "fc_norm": False,  # features are normalized before pooling: one layout for both pools
        }

    def _rotations(self) -> dict[str, Any]:
        """Return the arguments that only timm's Eva has."""
        is_eva = self.positions == "rope_eva"
        return {
            "num_reg_tokens": self.registers,
            "swiglu_mlp": self.swiglu,
            "swiglu_align_to": 64,
            "use_fc_norm": False,
            "use_abs_pos_emb": False,
            "use_rot_pos_emb": True,
            "rope_type": "cat" if is_eva else "dinov3",
            "rope_temperature": 10_000.0 if is_eva else 100.0,
            "rope_rotate_half": not is_eva,
        }

    def _rotary(self, sizes: dict[str, Any]) -> nn.Module:
        """Build timm's Eva; ``sizes`` are the arguments that VisionTransformer also has."""
        from timm.models import Eva
        from torch import nn

        from selftask.models.backbones.rope import CapiRope, draw_coordinates_per_sample

        model = Eva(
            **sizes,
            **self._rotations(),
            norm_layer=partial(nn.LayerNorm, eps=1e-6 if self.positions == "rope_eva" else 1e-5),
            **{f"rope_{name}_coords": value for name, value in self._coordinates().items()},
        )
        draw_coordinates_per_sample(model)
        if self.positions == "rope_capi":
            grid = model.patch_embed.grid_size
            model.rope = CapiRope(self.embed_dim // self.num_heads, self.registers, grid)
            for block in model.blocks:
                block.attn.num_prefix_tokens = int(self.class_token)  # registers have positions
        return model


@register_backbone("vit_micro")
@dataclass(frozen=True, kw_only=True)
class ViTMicro(_ViT):
    """ViT for 32 x 32 pixels on a CPU: 4 blocks of width 96, 3 heads, 0.5 M parameters."""

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


@register_backbone("vit_large")
@dataclass(frozen=True, kw_only=True)
class ViTLarge(_ViT):
    """ViT-L: 24 blocks of width 1024, 16 heads, 303 M parameters."""

    embed_dim, num_heads = 1024, 16

    depth: int = setting(24, min=1, max=1000)
    """Number of blocks."""
