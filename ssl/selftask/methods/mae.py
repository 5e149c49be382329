"""MAE: reconstruct the pixels of masked patches from a quarter of the patches.

B: images per rank, N: patches of an image, K kept and M masked ones, P: numbers in a patch (its
pixels times the channels), E: width of the backbone, T: its prefix tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.methods.families.masked_patches import Kept, MaskedPatches, build_kept_network
from selftask.models.features.extract import adapter_of
from selftask.models.features.tokens import Grid, gather_tokens
from selftask.models.network import PatchOutput
from selftask.models.precision import to_float32
from selftask.random.keyed import uniform
from selftask.registry import register_method

if TYPE_CHECKING:
    from selftask.task import Task


@register_method("mae")
class MAE(MaskedPatches):
    """MAE (arXiv:2111.06377): reconstructs an image from a quarter of its patches.

    Loss: ``mean (x - x')^2`` of hidden patches, standardized.

    Published: ImageNet fine-tuned top-1 after 300 epochs of ViT-B 82.9, after 1600 83.6 (as quoted
    by CMAE's README).

    Use it to fine-tune a transformer; cheap for each image, weak by k-NN.
    """

    paper = "He et al., Masked Autoencoders Are Scalable Vision Learners, CVPR 2022"
    requires: ClassVar[tuple[str, ...]] = ("subset",)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        mask_ratio: float = setting(0.75, above=0, below=1)
        """Share of the patches that are masked, drawn at random."""
        normalize_pixels: bool = True
        """Whether each target patch is normalized to mean 0 and variance 1, table 1d."""
        decoder_dim: int = setting(512, min=1, tiny=16)
        """Width of the decoder."""
        decoder_depth: int = setting(8, min=1, tiny=1)
        """Blocks of the decoder."""
        decoder_heads: int = setting(16, min=1, tiny=2)
        """Attention heads of the decoder."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if self.decoder_dim % 4 or self.decoder_dim % self.decoder_heads:
                yield (
                    f"decoder_dim: {self.decoder_dim} must be divisible by 4 (its positions) and "
                    f"by decoder_heads={self.decoder_heads}"
                )

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Build the network with fixed positions, and the paper's initial weights unless loaded."""
        config, adapter = self.config, adapter_of(backbone)
        self.num_kept(adapter.built_grid)
        self.patch_size = adapter.patch_size[0]
        return build_kept_network(
            backbone,
            task,
            initialize,
            num_out=task.data_module.channels * self.patch_size**2,
            dim=config.decoder_dim,
            depth=config.decoder_depth,
            num_heads=config.decoder_heads,
        )

    def num_kept(self, grid: Grid) -> int:
        """Return the number of encoded patches. Raise UserError if it is none or all."""
        ratio, num_patches = self.config.mask_ratio, grid[0] * grid[1]
        kept = int(num_patches * (1 - ratio))
        if kept == num_patches:
            raise UserError(
                f"method.mask_ratio={ratio} hides none of the {num_patches} patches of an image; "
                "raise it"
            )
        if kept == 0:
            raise UserError(
                f"method.mask_ratio={ratio} hides all {num_patches} patches of an image; lower it, "
                "or take a smaller backbone.patch_size"
            )
        return kept

    def draw_mask(self, seed: int, key: Tensor, grid: Grid) -> Kept:
        """Keep the patches with the lowest draws; the others are predicted as one group."""
        draws = uniform(seed, key, grid[0] * grid[1])  # (B, N)
        order = draws.argsort(dim=1, stable=True)
        num_kept = self.num_kept(grid)
        return Kept(order[:, :num_kept], order[:, None, num_kept:])

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        batch = task.last_batch
        patches = patchify(batch.all_views[0], self.patch_size)  # (B, N, P)
        pixels = gather_tokens(patches, batch["mask"].asked[:, 0])  # (B, M, P)
        batch["pixels"] = normalize(pixels) if self.config.normalize_pixels else pixels

    def forward(self, output: PatchOutput, batch: Batch) -> Tensor:
        """Return the mean squared error over masked patches only."""
        return F.mse_loss(to_float32(output.prediction[:, 0]), batch["pixels"])  # (B, M, P)

    def visualize(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the image, the kept patches, and the prediction of the others.

        Predictions of standardized patches get the mean and deviation of the true patch, as in the
        figures of the paper.
        """
        images = batch.all_views[0]
        patches = patchify(images, self.patch_size)  # (B, N, P)
        keep, asked = batch["mask"].keep, batch["mask"].asked[:, 0]
        painted = to_float32(output.prediction[:, 0])
        if self.config.normalize_pixels:
            true = gather_tokens(patches, asked)
            variance, mean = torch.var_mean(true, dim=-1, keepdim=True)
            painted = painted * (variance + 1e-6).sqrt() + mean
        kept = gather_tokens(patches, keep)
        masked = torch.zeros_like(patches).scatter(1, keep[..., None].expand_as(kept), kept)
        filled = masked.scatter(1, asked[..., None].expand_as(painted), painted)
        grid = (images.shape[2] // self.patch_size, images.shape[3] // self.patch_size)
        return {
            "image": images,
            "masked": unpatchify(masked, grid, self.patch_size),
            "reconstruction": unpatchify(filled, grid, self.patch_size),
        }

    @property
    def chance_loss(self) -> float | None:
        """Loss of the mean of each patch, which is its variance: 1, with ``normalize_pixels``."""
        return 1.0 if self.config.normalize_pixels else None


def patchify(images: Tensor, patch: int) -> Tensor:
    """Cut images (B, C, H, W) into patches (B, N, patch * patch * C), row by row.

    Within a patch the channel runs fastest, as in MAE's published code.
    """
    x = images.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # (B, C, h, p, w, p)
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpatchify(patches: Tensor, grid: Grid, patch: int) -> Tensor:
    """Join patches to images; the inverse of ``patchify``.

    Args:
        patches: (B, N, patch * patch * C).
        grid: Rows and columns of patches.
        patch: Side of a patch in pixels.

    Returns:
        (B, C, H, W).
    """
    x = patches.unflatten(1, grid).unflatten(3, (patch, patch, -1))  # (B, h, w, p, p, C)
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def normalize(patches: Tensor) -> Tensor:
    """Standardize each patch (..., P) by its mean and unbiased deviation, as published."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + 1e-6).sqrt()


@torch.no_grad()
def initialize(module: nn.Module) -> None:
    """Initialize linear layers and patches with Xavier's uniform weights (appendix A.1).

    Biases are set to zero except that of the patch embedding, as in the published code.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(part.weight.view(len(part.weight), -1))
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)
    token = getattr(module, "cls_token", None)
    if token is not None:
        nn.init.normal_(token, std=0.02)
