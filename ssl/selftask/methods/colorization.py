"""Colorization: predict the colors of an image from its lightness.

B: images per rank, h, w: rows and columns of predicted colors, Q: bins of colors, K: bins of a
target, E: width of the backbone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import all_reduce_sum
from selftask.errors import UserError
from selftask.methods.base import Task
from selftask.methods.families.view_pixels import ViewPixels, require_stride
from selftask.models.build import embed_dim
from selftask.models.features.extract import adapter_of
from selftask.models.heads import transposed_decoder
from selftask.models.network import MapNetwork, PatchOutput
from selftask.models.precision import in_full_precision, to_float32
from selftask.registry import register_method

STRIDE = 4  # pixels of an image between predicted colors, at most
NUM_NEAREST = 5  # bins of a target, K
SIGMA = 5.0  # of Gaussian kernels, in units of a and b
TEMPERATURE = 0.38  # of the annealed mean, eq. 5


@register_method("colorization")
class Colorization(ViewPixels):
    """Colorful Image Colorization (arXiv:1603.08511): predicts colors of an image from lightness.

    Views are in Lab, by the transform ``lab``. The network sees L in each of its three channels;
    evaluations need the transform ``lightness``, which does the same.

    Loss: ``-w[q*] sum_q z_q log softmax(s)_q`` of the scores s of a position, over bins q of the
    colors (a, b): z are the shares of the five bins nearest to its color, and w is the weight of
    the nearest bin q* (eq. 2), which is larger for rare colors.

    Published: ImageNet linear top-1 of ResNet-50 40.1 (VISSL's README).

    Use it as a baseline on color photographs.

    Differs from the authors' code:

    * The distribution of colors, for w, is measured on the training images so far; the authors'
      code reads it from a file.
    * Targets have five bins, as in the paper; in the authors' code, ten.
    * Images without color are included; the authors' code excludes them.
    * The weights w multiply loss and gradient; in the authors' code, only the gradient.
    """

    paper = "Zhang et al., Colorful Image Colorization, ECCV 2016"
    loss_reduction = "samples"
    sample_dim = 0
    views = 1
    requires = ("dense",)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        bin_size: int = setting(10, min=1, max=50, tiny=50)
        """Side of a bin of colors, in units of a and b: 313 bins with 10."""
        uniform_share: float = setting(0.5, above=0, max=1)
        """Share of the uniform distribution that is mixed into the distribution of colors, lambda
        in eq. 4; 1 gives all colors the same weight.
        """
        decoder_dim: int = setting(256, min=1, tiny=16)
        """Width of the decoder."""

    bins: Tensor  # (Q, 2), a and b of each
    kernel: Tensor  # (Q, Q), smooths a distribution
    counts: Tensor  # (Q,), colors of the images so far

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        bins = gamut_bins(config.bin_size)
        kernel = (-torch.cdist(bins, bins).square() / (2 * SIGMA**2)).exp()
        self.register_buffer("bins", bins, persistent=False)
        self.register_buffer("kernel", kernel / kernel.sum(dim=0), persistent=False)
        self.register_buffer("counts", torch.ones(len(bins)))

    @staticmethod
    def check_backbone(backbone: nn.Module) -> None:
        """Raise UserError if the stride of the backbone's map is not known."""
        require_stride(backbone, "colors")

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Return the backbone, and a decoder from its map to scores of bins.

        Raises:
            UserError: If the views are not in Lab or not normalized, or if the stride of the
                backbone's map is not known.
        """
        self.check_backbone(backbone)
        self.read_moments(task)
        groups = task.config.views.values()
        if not all(any(part.name == "lab" for part in group.transforms) for group in groups):
            raise UserError(
                "views: colorization predicts colors in Lab; end the transforms by lab, normalize"
            )
        sizes = embed_dim(backbone), self.config.decoder_dim, len(self.bins)
        stride = adapter_of(backbone).stride
        decoder = transposed_decoder(*sizes, stride=stride, out_stride=STRIDE)
        return MapNetwork(backbone, decoder)

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Set the input to the lightness, repeated in all channels."""
        (images,) = batch.all_views
        batch.input = images[:, :1].expand(-1, 3, -1, -1)

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Compute ``batch["target"]``, ``SoftColors`` of the mean color at each position.

        In training, also count the nearest bins of these colors, for ``on_update``.
        """
        batch = task.last_batch
        (images,) = batch.all_views
        lab = to_float32(images) * self.std + self.mean
        size = batch.output.prediction.shape[2:]
        colors = F.adaptive_avg_pool2d(255 * lab[:, 1:] - 128, size)
        batch["target"] = target = soft_encoding(colors, self.bins)
        if task.train:
            nearest = target.bins[:, 0].flatten()
            ones = torch.ones_like(nearest, dtype=self.counts.dtype)
            self.pending.append(torch.zeros_like(self.counts).scatter_add_(0, nearest, ones))

    def forward(self, output: PatchOutput, batch: Batch) -> Tensor:
        """Return the loss of eq. 2 for the scores ``output.prediction`` (B, Q, h, w)."""
        return self._loss(output.prediction, batch["target"])

    @in_full_precision
    def _loss(self, scores: Tensor, target: SoftColors) -> Tensor:
        smooth = self.kernel @ (self.counts / self.counts.sum())
        weights = rebalancing(smooth, self.config.uniform_share)
        return color_loss(scores, target, weights)

    @torch.no_grad()
    def on_update(self, task: Task) -> None:
        """Count the colors of the step."""
        self.counts += all_reduce_sum(torch.stack(self.take_pending()).sum(dim=0))

    def visualize(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the image, its lightness, and the lightness with predicted colors (eq. 5)."""
        (images,) = batch.all_views
        lab = to_float32(images) * self.std + self.mean
        shares = (to_float32(output.prediction) / TEMPERATURE).softmax(dim=1)
        colors = torch.einsum("bqhw,qc->bchw", shares, self.bins)
        colors = F.interpolate(colors, images.shape[2:], mode="bilinear")
        predicted = torch.cat([lab[:, :1], (colors + 128) / 255], dim=1)
        image, colorized = ((to_rgb(x).to(x) - self.mean) / self.std for x in (lab, predicted))
        return {"image": image, "lightness": batch.input, "colorized": colorized}

    @property
    def chance_loss(self) -> float:
        """Loss of equal scores: ln(number of bins), if the colors' distribution does not change."""
        return math.log(len(gamut_bins(self.config.bin_size)))


class SoftColors(NamedTuple):
    """Shares of the nearest bins of each position, the nearest one first."""

    bins: Tensor
    """(B, K, h, w) int64."""
    shares: Tensor
    """(B, K, h, w), of sum 1."""


def gamut_bins(size: int) -> Tensor:
    """Return the bins of colors in CIELAB: their a and b, (Q, 2), sorted by a, then by b.

    The bins are points of a square grid. A point is kept if at least one of the four grid cells
    around it meets the convex hull of all sRGB colors. Size 10 gives the 313 bins of the paper.

    Args:
        size: Distance between neighboring grid points, in units of a and b.
    """
    levels = np.linspace(0, 1, 33, dtype=np.float32)
    rgb = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(1, -1, 3)
    colors = cv2.cvtColor(rgb, cv2.COLOR_RGB2LAB)[0, :, 1:]
    angles = np.arange(360) * np.pi / 180
    normals = np.stack([np.cos(angles), np.sin(angles)])  # of lines
    side = np.arange(-(128 // size) * size, 128, size)
    grid = np.stack(np.meshgrid(side, side, indexing="ij"), axis=-1).reshape(-1, 2)
    reach = (colors @ normals).max(axis=0) + size * np.abs(normals).sum(axis=0)
    kept = grid[(grid @ normals <= reach).all(axis=1)]
    return torch.from_numpy(kept).to(torch.get_default_dtype())


def soft_encoding(colors: Tensor, bins: Tensor) -> SoftColors:
    """Return the nearest bins of colors, with shares by a Gaussian kernel (section 2.1).

    Args:
        colors: (B, 2, h, w), a and b.
        bins: (Q, 2).
    """
    exact = "donot_use_mm_for_euclid_dist"
    rows = colors.permute(0, 2, 3, 1).flatten(0, 2)
    distances = torch.cdist(rows, bins, compute_mode=exact)
    nearest = distances.topk(min(NUM_NEAREST, len(bins)), dim=1, largest=False)
    shares = (-nearest.values.square() / (2 * SIGMA**2)).softmax(dim=1)
    size = (len(colors), *colors.shape[2:])
    numbers, shares = (x.unflatten(0, size).permute(0, 3, 1, 2) for x in (nearest.indices, shares))
    return SoftColors(numbers, shares)


def rebalancing(probs: Tensor, uniform_share: float) -> Tensor:
    """Return the class-rebalancing weights of the bins (Q,), eq. 4.

    Their expected value under ``probs`` is 1.

    Args:
        probs: (Q,), the distribution of colors, smoothed.
        uniform_share: Share of the uniform distribution that is mixed into it.
    """
    weights = 1 / ((1 - uniform_share) * probs + uniform_share / len(probs))
    return weights / (probs * weights).sum()


def color_loss(scores: Tensor, target: SoftColors, weights: Tensor) -> Tensor:
    """Return the weighted cross-entropy (eq. 2), a mean over positions and images.

    Args:
        scores: (B, Q, h, w).
        target: Bins and shares, (B, K, h, w).
        weights: (Q,); a position gets the weight of its nearest bin.
    """
    log_probs = scores.log_softmax(dim=1).gather(1, target.bins)
    entropy = -(target.shares * log_probs).sum(dim=1)  # (B, h, w)
    return (weights[target.bins[:, 0]] * entropy).mean()


def to_rgb(lab: Tensor) -> Tensor:
    """Convert Lab images (B, 3, H, W), scaled as by ``lab``, to RGB in [0, 1] on the CPU."""
    pixels = lab.mul(255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()
    rgb = np.stack([cv2.cvtColor(image, cv2.COLOR_LAB2RGB) for image in pixels])
    return torch.from_numpy(rgb).permute(0, 3, 1, 2) / 255
