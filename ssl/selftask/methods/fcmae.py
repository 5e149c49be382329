"""FCMAE: MAE for ConvNeXt V2, with sparse convolutions and a decoder of one dense block.

B: images per rank, C: channels of an image, N = h * w: patches, whose side is the total stride of
the backbone, K: visible patches, E: width of the coarsest map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selftask.config.fields import setting
from selftask.methods.spark import SparK
from selftask.models.features.extract import adapter_of
from selftask.models.features.levels import levels_of
from selftask.models.features.sparse import VISIBLE
from selftask.models.features.unet_decoder import fill_hidden
from selftask.registry import register_method


@register_method("fcmae")
class FCMAE(SparK):
    """FCMAE (arXiv:2301.00808): masked pretraining of ConvNeXt V2 with a decoder of one block.

    It is SparK with a decoder that reads only the coarsest feature map and has no norms.

    Loss: ``mean (x - x')^2`` of the standardized pixels x of hidden patches and their predictions
    x'.

    Use it before fine-tuning ConvNeXt V2.

    Differs from the authors' code:

    * Convolutions are dense, with zeros at hidden positions, as in the authors' JAX code; the
      result equals that of sparse convolutions, without saving computation.
    * Global response normalization is over the visible positions of an image, as in the paper and
      in fine-tuning; the authors' PyTorch code uses those of all images of the batch.
    """

    paper = (
        "Woo et al., ConvNeXt V2: Co-designing and Scaling ConvNets with Masked Autoencoders, "
        "CVPR 2023"
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(SparK.Config):
        decoder_dim: int = setting(512, min=2, tiny=32)
        """Width of the decoder."""
        levels: int = setting(1, min=1, max=1)
        """Number of resolutions that the decoder receives: only the coarsest."""
        decoder_depth: int = setting(1, min=1)
        """Number of blocks of the decoder."""

    def build_decoder(self, backbone: nn.Module, channels: int) -> tuple[nn.Module, list[int]]:
        level = levels_of(backbone, channels)[0]
        config, stride = self.config, adapter_of(backbone).stride
        sizes = config.decoder_dim, config.decoder_depth
        return BlockDecoder(level.width, *sizes, stride=stride, channels=channels), [level.layer]

    def num_visible(self, num_patches: int) -> int:
        """Return the number of visible patches, rounded down as in the authors' code."""
        return int(num_patches * (1 - self.config.mask_ratio))


class BlockDecoder(nn.Module):
    """Blocks of ConvNeXt V2 on the coarsest map, then a linear layer to the pixels of a patch.

    Args:
        width: Width E of the map.
        dim: Width D of the decoder.
        depth: Number of blocks.
        stride: Side of a patch in pixels.
        channels: Channels of the image, C.
    """

    def __init__(self, width: int, dim: int, depth: int, *, stride: int, channels: int) -> None:
        from timm.models.convnext import ConvNeXtBlock

        super().__init__()
        self.embed = nn.Conv2d(width, dim, 1)
        self.mask_token = nn.Parameter(nn.init.normal_(torch.empty(dim), std=0.02))
        self.blocks = nn.Sequential(
            *(ConvNeXtBlock(dim, use_grn=True, ls_init_value=None) for _ in range(depth))
        )
        self.predict = nn.Conv2d(dim, channels * stride**2, 1)
        self.to_image = nn.PixelShuffle(stride)
        self.apply(_initialize)

    def forward(self, maps: Sequence[Tensor], visible: Tensor, hidden: Tensor) -> Tensor:
        """Return images (B, C, H, W).

        Args:
            maps: One map, the coarsest, (B, E, h, w).
            visible: (B, K) indices of the visible patches.
            hidden: (B, h, w) bool, True for hidden patches.
        """
        x = self.embed(maps[0])  # (B, D, h, w)
        with VISIBLE.only(visible, (hidden.shape[1], hidden.shape[2])):
            x = fill_hidden(x, self.mask_token)
        return self.to_image(self.predict(self.blocks(x)))


def _initialize(part: nn.Module) -> None:
    """Initialize convolutions and linear layers as in the authors' code."""
    if isinstance(part, nn.Conv2d | nn.Linear):
        nn.init.trunc_normal_(part.weight, std=0.02)
        if part.bias is not None:
            nn.init.zeros_(part.bias)
