"""MaskFeat: predict histograms of oriented gradients of hidden patches.

B: images per rank, C: channels, N: patches of an image, H: maximum number of hidden ones, E: width
of the backbone, D: values in the histograms of a patch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.methods.base import Task
from selftask.methods.families.masked_patches import BlockMaskedPatches, mean_of_hidden
from selftask.models.features.extract import adapter_of
from selftask.models.features.tokens import gather_tokens
from selftask.models.network import PatchOutput
from selftask.models.precision import to_float32
from selftask.registry import register_method


@register_method("maskfeat")
class MaskFeat(BlockMaskedPatches):
    """MaskFeat (arXiv:2112.09133): predicts histograms of oriented gradients of hidden patches.

    Loss: ``mean (h - h')^2`` of the histograms h of hidden patches and their predictions h'.

    Published: ImageNet fine-tuned top-1 of ViT-B 84.0, ViT-L 85.7 (authors' README).

    Use it before fine-tuning a transformer, without a decoder or a teacher.

    Differs from the authors' code:

    * The loss is a mean over the hidden patches of an image, then over images; in the authors'
      code, over the hidden patches of a batch. The number of hidden patches differs slightly
      between images.
    """

    paper = (
        "Wei et al., Masked Feature Prediction for Self-Supervised Visual Pre-Training, CVPR 2022"
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(BlockMaskedPatches.Config):
        cell_size: int = setting(8, min=1, tiny=2)
        """Side of the cell of a histogram, in pixels; a patch must be divisible into cells."""
        num_bins: int = setting(9, min=2)
        """Number of orientations of a histogram, over half a turn."""

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Build the network. Raise UserError if patches cannot be divided into cells."""
        self.patch_size, cell = adapter_of(backbone).patch_size[0], self.config.cell_size
        if self.patch_size % cell:
            raise UserError(
                f"method.cell_size={cell}: patches of {self.patch_size} pixels cannot be divided "
                "into such cells"
            )
        self.num_cells = (self.patch_size // cell) ** 2
        self.channels = task.data_module.channels
        return super().build_network(backbone, task)

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build the linear layer from a patch to its histograms."""
        head = nn.Linear(embed_dim, self.channels * self.config.num_bins * self.num_cells)
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        return head

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Compute ``batch["targets"]`` (B, H, D), histograms of the hidden patches."""
        batch, config = task.last_batch, self.config
        histograms = oriented_gradients(batch.all_views[0], config.cell_size, config.num_bins)
        patches = by_patch(histograms, self.patch_size // config.cell_size)  # (B, N, D)
        batch["targets"] = gather_tokens(patches, batch["hidden"][0])

    def forward(self, output: PatchOutput, batch: Batch) -> Tensor:
        """Return the mean squared error of ``output.prediction`` (B, H, D).

        It is a mean over the hidden patches of an image, then over images.
        """
        errors = (to_float32(output.prediction) - batch["targets"]).square().mean(dim=2)
        return mean_of_hidden(errors, batch["hidden"][1])


def oriented_gradients(images: Tensor, cell_size: int, num_bins: int) -> Tensor:
    """Return a histogram of gradients for each cell and channel, of Euclidean norm 1.

    Gradients are Sobel's, weighted by their length. Opposite directions are in the same bin, and
    there is no interpolation between bins. The histogram of a cell without gradients is 0.

    Args:
        images: (B, C, height, width).
        cell_size: Side of a cell in pixels.
        num_bins: Number of bins over half a turn.

    Returns:
        (B, C, num_bins, height / cell_size, width / cell_size).
    """
    pixels = F.pad(to_float32(images), (1, 1, 1, 1), mode="reflect")
    across = pixels[..., :, :-2] - pixels[..., :, 2:]
    across = across[..., :-2, :] + 2 * across[..., 1:-1, :] + across[..., 2:, :]
    down = pixels[..., :-2, :] - pixels[..., 2:, :]
    down = down[..., :, :-2] + 2 * down[..., :, 1:-1] + down[..., :, 2:]
    length = (across.square() + down.square()).sqrt()
    bins = (torch.atan2(across, down) / math.pi * num_bins).floor().long() % num_bins
    shares = length[:, :, None] * (bins[:, :, None] == _numbers(num_bins, bins))
    histograms = F.avg_pool2d(shares.flatten(1, 2), cell_size).unflatten(1, (-1, num_bins))
    return F.normalize(histograms, dim=2)


def _numbers(count: int, like: Tensor) -> Tensor:
    """Return the integers from 0 to ``count`` - 1, (count, 1, 1), on the device of ``like``."""
    return torch.arange(count, device=like.device)[:, None, None]


def by_patch(histograms: Tensor, side: int) -> Tensor:
    """Return the histograms of each patch: channel, bin, row and column of cells, column fastest.

    Args:
        histograms: (B, C, bins, rows of cells, columns of cells).
        side: Cells in a row of a patch.

    Returns:
        (B, N, C * bins * side * side).
    """
    cells = histograms.unflatten(4, (-1, side)).unflatten(3, (-1, side))
    return cells.permute(0, 3, 5, 1, 2, 4, 6).flatten(3).flatten(1, 2)
