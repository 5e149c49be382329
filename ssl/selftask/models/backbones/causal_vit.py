"""Vision transformer as a language model of patches, in timm's layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from selftask.config.fields import setting
from selftask.registry import register_backbone

if TYPE_CHECKING:
    from torch import nn


@register_backbone("causal_vit")
@dataclass(frozen=True, kw_only=True)
class CausalViT:
    """Causal transformer over patches, in which each attends to earlier ones; iGPT-S by default.

    Patches are ordered row by row and attend to a start token, too. The output is the mean of the
    patch tokens.
    """

    offers = ("dense", "hidden", "tokens", "subset", "attention", "groups")
    library = "timm"

    img_size: int = setting(32, min=1)
    """Height and width of images, in pixels."""
    patch_size: int = setting(1, min=1)
    """Height and width of a patch, in pixels."""
    embed_dim: int = setting(512, min=1)
    """Number of features of a token."""
    depth: int = setting(24, min=1, max=1000)
    """Number of blocks."""
    num_heads: int = setting(8, min=1)
    """Attention heads of a block."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        for name, divisor in (("img_size", "patch_size"), ("embed_dim", "num_heads")):
            if getattr(self, name) % getattr(self, divisor):
                yield (
                    f"backbone.{name}: {getattr(self, name)} must be divisible by {divisor}="
                    f"{getattr(self, divisor)}"
                )

    def tiny(self) -> dict[str, Any]:
        sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}
        return {"name": "causal_vit", **sizes}

    def build(self, channels: int = 3) -> nn.Module:
        """Build timm's model with random weights; its class token is the start token."""
        from timm.models import VisionTransformer  # slow to import
        from torch import nn

        from selftask.models.backbones.causal_attention import CausalAttention

        model: Any = VisionTransformer(
            **asdict(self),
            in_chans=channels,
            num_classes=0,
            global_pool="avg",
            fc_norm=False,
            attn_layer=CausalAttention,
        )
        nn.init.trunc_normal_(model.cls_token, std=0.02)  # timm: 1e-6
        model.causal = True
        return model
