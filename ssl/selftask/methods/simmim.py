"""SimMIM: replace random squares of an image by a mask token and predict their pixels.

Xie et al., SimMIM: a Simple Framework for Masked Image Modeling, CVPR 2022, arXiv:2111.09886.

B: images per rank, C: channels, N = h * w: patches that can be masked (of 4 pixels in a Swin, of 16
in a ViT).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.methods.base import Method
from selftask.models.build import embed_dim
from selftask.models.features.adapter import Adapter
from selftask.models.features.extract import adapter_of, extract
from selftask.models.masks import hide_patches, random_mask
from selftask.models.network import Network
from selftask.models.precision import to_float32
from selftask.registry import register_method

if TYPE_CHECKING:
    from selftask.task import Task


@register_method("simmim")
class SimMIM(Method):
    """SimMIM (arXiv:2111.09886): a linear layer predicts the pixels of masked squares."""

    loss_reduction = "samples"
    sample_dim = 0
    views = 1
    requires = ("tokens", "dense")

    @dataclass(frozen=True, kw_only=True)
    class Config:
        mask_ratio: float = setting(0.6, above=0, below=1)
        """Share of the squares that are masked."""
        mask_size: int = setting(32, min=1, tiny=8)
        """Side of a masked square, in pixels."""

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        adapter = adapter_of(backbone)
        rows, columns = adapter.built_grid
        self._check_size(adapter, rows * adapter.patch_size[0], columns * adapter.patch_size[1])
        return MaskedPixels(backbone, adapter, task.data_module.channels)

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Draw the masks ``batch["mask"]`` (B, h, w), with equally many patches in each image."""
        (images,) = batch.all_views
        height, width = images.shape[-2:]
        adapter = adapter_of(task.base_model.backbone)
        self._check_size(adapter, height, width)
        grid = adapter.grid(height, width)
        mask = random_mask(
            task.config.train.seed,
            batch.key.to(images.device, non_blocking=True),
            grid,
            ratio=self.config.mask_ratio,
            unit=self.config.mask_size // adapter.patch_size[0],
        )
        batch["mask"] = mask.unflatten(1, grid)
        batch.input = (images, mask)

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the mean absolute error of the masked pixels; ``output`` (B, C, H, W)."""
        (images,) = batch.all_views
        return masked_l1(to_float32(output), images, batch["mask"])

    def visualize(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the image, its visible pixels, and the prediction of the others."""
        (images,) = batch.all_views
        mask = batch["mask"].flatten(1)
        seen = hide_patches(images, mask)
        painted = seen + hide_patches(to_float32(output), ~mask)
        return {"image": images, "masked": seen, "reconstruction": painted}

    def _check_size(self, adapter: Adapter, height: int, width: int) -> None:
        """Raise UserError if squares of ``mask_size`` do not fit images and patches."""
        side = self.config.mask_size
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


class MaskedPixels(Network):
    """Backbone with masked patches, then a 1 x 1 convolution: (images, mask) -> (B, C, H, W)."""

    def __init__(self, backbone: nn.Module, adapter: Adapter, channels: int) -> None:
        decoder = nn.Sequential(
            nn.Conv2d(embed_dim(backbone), channels * adapter.stride**2, 1),
            nn.PixelShuffle(adapter.stride),
        )
        super().__init__(backbone, decoder)
        self.mask_token = nn.Parameter(torch.empty(adapter.mask_dim))
        nn.init.trunc_normal_(self.mask_token, std=0.02)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        images, mask = inputs
        features = extract(self.backbone, images, mask=mask, mask_token=self.mask_token)
        self.embedding = features.pooled.detach()
        pixels: Tensor = self.head(features.tokens.map)
        return pixels


def masked_l1(pixels: Tensor, images: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of |pixels - images| over masked patches.

    The published code adds 1e-5 to the number of masked pixels.

    Args:
        pixels: (B, C, H, W).
        images: (B, C, H, W).
        mask: (B, h, w) bool, True for masked patches.
    """
    rows, columns = mask.shape[1:]
    distance = (pixels - images).abs()
    patches = distance.unflatten(3, (columns, -1)).unflatten(2, (rows, -1))  # (B, C, h, p, w, p)
    of_patch = patches.mean(dim=(1, 3, 5))  # (B, h, w)
    return (of_patch * mask).sum() / mask.sum()
