"""SimMIM: replace random squares of an image with a mask token and predict their pixels.

B: images per rank, C: channels, N = h * w: patches that can be masked (of 4 pixels in a Swin, of 16
in a ViT).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.methods.base import Task
from selftask.methods.families.masked_patches import MaskedNetwork, MaskedPatches
from selftask.models.build import embed_dim
from selftask.models.features.extract import adapter_of
from selftask.models.features.tokens import Grid
from selftask.models.heads import pixel_decoder
from selftask.models.masks import hide_patches, masked_mean, random_mask
from selftask.models.network import PatchOutput
from selftask.models.precision import to_float32
from selftask.registry import register_method


@register_method("simmim")
class SimMIM(MaskedPatches):
    """SimMIM (arXiv:2111.09886): predicts the pixels of hidden squares with one linear layer.

    Loss: ``mean |x - x'|`` of the pixels x of hidden patches and their predictions x'.

    Use it before fine-tuning Swin or another network that cannot skip patches.

    Differs from the authors' code:

    * The learning rate is that of the current step; in the authors' code, of the previous step.
    * The authors' code adds 1e-5 to the number of masked pixels.
    * ViT-B has learned positions; in the authors' code, relative position biases that all blocks
      share.
    """

    paper = "Xie et al., SimMIM: a Simple Framework for Masked Image Modeling, CVPR 2022"
    requires = ("tokens", "dense")

    @dataclass(frozen=True, kw_only=True)
    class Config:
        mask_ratio: float = setting(0.6, above=0, below=1)
        """Share of the squares that are masked."""
        mask_size: int = setting(32, min=1, tiny=8)
        """Side of a masked square, in pixels."""

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Return the backbone with a 1 x 1 convolution to the pixels of each location."""
        self.adapter = adapter_of(backbone)
        self.check_grid(self.adapter.built_grid)
        channels, stride = task.data_module.channels, self.adapter.stride
        decoder = pixel_decoder(embed_dim(backbone), channels, stride)
        return MaskedNetwork(backbone, decoder, takes_map=True)

    def draw_mask(self, seed: int, key: Tensor, grid: Grid) -> Tensor:
        """Return masks (B, h, w), True for hidden patches, the same number in each image."""
        self.check_grid(grid)
        unit = self.config.mask_size // self.adapter.patch_size[0]
        mask = random_mask(seed, key, grid, ratio=self.config.mask_ratio, unit=unit)
        return mask.unflatten(1, grid)

    def forward(self, output: PatchOutput, batch: Batch) -> Tensor:
        """Return the mean absolute error of ``output.prediction`` (B, C, H, W) at masked pixels."""
        (images,) = batch.all_views
        return masked_l1(to_float32(output.prediction), images, batch["mask"])

    def visualize(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the image, its visible pixels, and these with the predicted others."""
        shown, predicted = super().visualize(output, batch), to_float32(output.prediction)
        painted = shown["masked"] + hide_patches(predicted, ~batch["mask"].flatten(1))
        return {**shown, "reconstruction": painted}

    def check_grid(self, grid: Grid) -> None:
        """Raise UserError if squares of ``mask_size`` do not fit images and patches."""
        side, adapter = self.config.mask_size, self.adapter
        height, width = (n * patch for n, patch in zip(grid, adapter.patch_size, strict=True))
        if any(side % patch for patch in adapter.patch_size):
            raise UserError(
                f"method.mask_size={side} pixels cannot be divided into the backbone's patches of "
                f"{adapter.patch_size[0]} pixels; set it to a multiple"
            )
        unit = math.lcm(side, adapter.stride)
        if height % unit or width % unit:
            raise UserError(
                f"method.mask_size={side}: images of {height}x{width} pixels cannot be divided "
                f"into squares of {unit} pixels (masks of {side}, a backbone of stride "
                f"{adapter.stride})"
            )


def masked_l1(pixels: Tensor, images: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of |pixels - images| over masked patches.

    Args:
        pixels: (B, C, H, W).
        images: (B, C, H, W).
        mask: (B, h, w) bool, True for masked patches.
    """
    return masked_mean((pixels - images).abs(), mask)
