"""MAE: reconstruct the pixels of masked patches from a quarter of the patches.

B: images per rank, N: patches of an image, K kept and M masked ones, P: numbers in a patch (its
pixels times the channels), E: width of the backbone, T: its prefix tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.methods.families.masked_patches import KeptPatches
from selftask.models.features.extract import adapter_of
from selftask.models.features.tokens import Grid, gather_tokens
from selftask.models.network import PatchOutput
from selftask.models.precision import to_float32
from selftask.registry import register_method

if TYPE_CHECKING:
    from selftask.task import Task


@register_method("mae")
class MAE(KeptPatches):
    """MAE (arXiv:2111.06377): reconstructs an image from a quarter of its patches.

    Loss: ``mean (x - x')^2`` of hidden patches, standardized.

    Published: ImageNet fine-tuned top-1 after 300 epochs of ViT-B 82.9, after 1600 83.6 (as quoted
    by CMAE's README).

    Use it to fine-tune a transformer; cheap for each image, weak by k-NN.
    """

    paper = "He et al., Masked Autoencoders Are Scalable Vision Learners, CVPR 2022"

    @dataclass(frozen=True, kw_only=True)
    class Config(KeptPatches.Config):
        normalize_pixels: bool = True
        """Whether each target patch is normalized to mean 0 and variance 1, table 1d."""

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Build the network with the paper's initial weights and fixed positions.

        A loaded backbone keeps its own.
        """
        self.patch_size = adapter_of(backbone).patch_size[0]
        return self.build_kept(backbone, task, task.data_module.channels * self.patch_size**2)

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
