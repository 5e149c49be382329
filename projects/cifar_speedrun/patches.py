"""One wide layer on whitened patches, trained by k-means: the fastest features that we know.

Coates, Lee and Ng, An Analysis of Single-Layer Networks in Unsupervised Feature Learning, AISTATS
2011; with a fixed threshold instead of the triangle activation, as in Coates and Ng, The Importance
of Encoding Versus Training with Sparse Coding and Vector Quantization, ICML 2011.

B: images, P: patches of an image, D: values in a patch, K: filters, S: 2 for both signs, else 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import all_reduce_sum
from selftask.errors import UserError
from selftask.methods.base import Method
from selftask.models.network import Network
from selftask.registry import register_backbone, register_method

if TYPE_CHECKING:
    from selftask.task import Task

IMAGES_AT_ONCE = 8  # so that the similarities of their patches stay in the cache


@register_backbone("patch_bank")
@dataclass(frozen=True, kw_only=True)
class PatchBankConfig:
    """Projections of whitened patches on a bank of filters, averaged over a grid of cells."""

    filters: int = setting(1024, min=1)  # K
    patch_size: int = setting(6, min=1)  # pixels
    pool: int = setting(2, min=1)  # cells of the grid on each side
    threshold: float = setting(0.25, min=0)  # smaller projections count as 0
    both_signs: bool = False  # projections on the negatives of the filters are features, too

    def tiny(self) -> dict[str, object]:
        return {"name": "patch_bank", "filters": 8, "patch_size": 3}

    def build(self, channels: int = 3) -> nn.Module:
        return PatchBank(self, channels)


class PatchBank(nn.Module):
    """Images (B, C, H, W) -> features (B, pool * pool * S * K)."""

    mean: Tensor
    whitening: Tensor

    def __init__(self, config: PatchBankConfig, channels: int) -> None:
        super().__init__()
        self.patch_size, self.pool = config.patch_size, config.pool
        self.threshold, self.both_signs = config.threshold, config.both_signs
        self.embed_dim = config.pool**2 * config.filters * (2 if config.both_signs else 1)
        width = channels * config.patch_size**2  # D
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("whitening", torch.eye(width))
        self.filters = nn.Parameter(F.normalize(torch.randn(config.filters, width), dim=1))

    def contrast_normalized(self, images: Tensor) -> Tensor:
        """Return all patches with mean 0 and about variance 1: (B, P, D)."""
        patches = F.unfold(images, self.patch_size).transpose(1, 2)
        variance, mean = torch.var_mean(patches, dim=2, keepdim=True)
        return (patches - mean) * (variance + 0.0025).rsqrt()  # 10 / 255^2 before normalization

    def whitened(self, images: Tensor) -> Tensor:
        """Return whitened patches: (B, P, D)."""
        return (self.contrast_normalized(images) - self.mean) @ self.whitening

    def unit_filters(self) -> Tensor:
        """Return the filters with length 1, then their negatives: (S * K, D)."""
        filters = F.normalize(self.filters, dim=1)
        return torch.cat([filters, -filters]) if self.both_signs else filters

    def similarities(self, images: Tensor) -> Tensor:
        """Return cosine similarities of whitened patches to the filters: (B, P, S * K)."""
        return F.normalize(self.whitened(images), dim=2) @ self.unit_filters().T

    def forward(self, images: Tensor) -> Tensor:
        cells = self._cells(images)
        filters = self.unit_filters()
        bias = -self.threshold * torch.ones_like(filters[:, 0])
        parts = []
        for part in images.split(IMAGES_AT_ONCE):
            active = F.linear(self.whitened(part), filters, bias).relu_()  # (b, P, S * K)
            parts.append((cells.to(active.dtype) @ active).flatten(1))  # sums cells without a copy
        return torch.cat(parts)

    def _cells(self, images: Tensor) -> Tensor:
        """Return the weight of each patch in each cell of the grid: (pool * pool, P)."""
        height, width = (size - self.patch_size + 1 for size in images.shape[2:])
        each = torch.eye(height * width, dtype=images.dtype, device=images.device)
        return F.adaptive_avg_pool2d(each.view(-1, height, width), self.pool).flatten(1).T


class BestSimilarity(Network):
    """Similarity of each patch to its nearest filter, averaged over the patches of an image."""

    def forward(self, views: list[Tensor]) -> Tensor:
        """Return (1, B, 1)."""
        (images,) = views
        best = self.backbone.similarities(images).amax(dim=2)  # (B, P)
        return best.mean(dim=1)[None, :, None]


@register_method("patch_kmeans")
class PatchKMeans(Method):
    """Spherical k-means on whitened patches by gradient steps; filters start as patches."""

    loss_reduction = "samples"
    views = 1

    @dataclass(frozen=True, kw_only=True)
    class Config:
        ridge: float = setting(0.1, above=0)  # added to the variances before whitening

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        if not isinstance(backbone, PatchBank):
            raise UserError("method=patch_kmeans trains backbone=patch_bank and no other")
        return BestSimilarity(backbone, nn.Identity())

    def on_phase_start(self, task: Task) -> None:
        """Before the first step: compute the whitening and initialize the filters with patches."""
        if task.train and task.clock.batch == 0:
            self._read_patches(task)

    @torch.no_grad()
    def _read_patches(self, task: Task) -> None:
        bank, num_images = task.base_model.backbone, task.data_module.num_images
        num_filters, width = bank.filters.shape
        if num_images < num_filters:
            raise UserError(
                f"backbone.filters={num_filters}: one image for each is needed, not {num_images}"
            )
        every = num_images // num_filters
        start = torch.zeros_like(bank.filters)  # (K, D)
        total = bank.mean.new_zeros(width + 1, width)  # sums of squares, then of values
        count = bank.mean.new_zeros(1)
        for batch in task.data_module.iterate_all():
            patches = bank.contrast_normalized(batch.all_views[0])  # (B, P, D)
            flat = patches.flatten(0, 1)
            total += torch.cat([flat.T @ flat, flat.sum(dim=0, keepdim=True)])
            count += len(flat)
            slot = batch.index // every
            mine = (batch.index % every == 0) & (slot < num_filters)
            start[slot[mine]] = patches[mine, patches.shape[1] // 2]
        start, total, count = (all_reduce_sum(part) for part in (start, total, count))

        bank.mean.copy_(total[-1] / count)
        covariance = total[:-1] / count - torch.outer(bank.mean, bank.mean)
        variances, axes = torch.linalg.eigh(covariance)
        scale = (variances.clamp(min=0) + self.config.ridge).rsqrt()
        bank.whitening.copy_(axes * scale @ axes.T)  # ZCA
        bank.filters.copy_(F.normalize((start - bank.mean) @ bank.whitening, dim=1))

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return one minus the mean similarity; ``output`` (1, B, 1)."""
        return 1 - output.mean()
