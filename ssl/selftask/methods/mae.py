"""MAE: reconstruct the pixels of masked patches from a quarter of the patches.

B: images per rank, N: patches of an image, K kept and M masked ones, P: values in a patch (its
pixels times the channels), E: width of the backbone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import gather_cat_with_grad
from selftask.methods.base import Task
from selftask.methods.families.masked_patches import KeptPatches
from selftask.methods.families.view_pixels import ViewPixels
from selftask.models.features.extract import adapter_of
from selftask.models.features.tokens import Grid, gather_tokens
from selftask.models.frequencies import low_frequencies, without
from selftask.models.network import PatchOutput
from selftask.models.precision import in_full_precision, to_float32
from selftask.registry import register_method


@register_method("mae")
class MAE(KeptPatches, ViewPixels):
    """MAE (arXiv:2111.06377): reconstructs an image from a quarter of its patches.

    With ``low_pass`` it is PixMIM (arXiv:2303.02416), with ``uniformity_weight`` U-MAE
    (arXiv:2210.08344).

    Loss: ``mean (x - x')^2`` of the standardized pixels x of hidden patches and their predictions
    x'.

    Published: ImageNet fine-tuned top-1 after 300 epochs of ViT-B 82.9, after 1600 83.6 (as quoted
    by CMAE's README).

    Use it before fine-tuning a transformer; the cost per image is low, and frozen features
    are weak by k-NN.

    Differs from the authors' code:

    * PixMIM's low frequencies are a disc around frequency 0; in the authors' code its center is
      half a frequency lower.
    * U-MAE's term compares the pooled features of the images of all ranks; the authors' code
      compares class tokens (the pooled features of most transformers) on each GPU separately.
    """

    paper = "He et al., Masked Autoencoders Are Scalable Vision Learners, CVPR 2022"
    columns = {
        "masked_pixels": "Term of the loss: pixels of the masked patches.",
        "squared_cosine": "Term of the loss: mean squared cosine between images (U-MAE).",
    }

    @dataclass(frozen=True, kw_only=True)
    class Config(KeptPatches.Config):
        normalize_pixels: bool = True
        """Whether each target patch is normalized to mean 0 and variance 1 (table 1d)."""
        low_pass: int = setting(0, min=0)
        """Limit of the frequencies of the targets, in periods per image (PixMIM: 40 for 224
        pixels); 0: all frequencies.
        """
        uniformity_weight: float = setting(0.0, min=0)
        """Weight of U-MAE's term, the mean squared cosine of the features of all pairs of images of
        all ranks; 0.01 in its paper.
        """

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Build the network with the paper's initial weights and fixed positions.

        A loaded backbone keeps its weights and positions.
        """
        if self.config.low_pass:
            self.read_moments(task)
        self.patch_size = adapter_of(backbone).patch_size[0]
        return self.build_kept(backbone, task, task.data_module.channels * self.patch_size**2)

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        batch = task.last_batch
        images = batch.all_views[0]
        if self.config.low_pass:
            high = ~low_frequencies(images.shape[-2:], self.config.low_pass, images.device)
            filtered = without(to_float32(images * self.std + self.mean), high).abs()
            images = (filtered - self.mean) / self.std
        patches = patchify(images, self.patch_size)  # (B, N, P)
        pixels = gather_tokens(patches, batch["mask"].predict[:, 0])  # (B, M, P)
        batch["pixels"] = normalize(pixels) if self.config.normalize_pixels else pixels

    def forward(self, output: PatchOutput, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Return the mean squared error of the masked patches.

        With ``uniformity_weight`` U-MAE's term is added, and both are returned by name.
        ``output.prediction`` is (B, 1, M, P).
        """
        terms = self.terms(output, batch)
        return terms if len(terms) > 1 else terms["masked_pixels"]

    def terms(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the weighted terms of the loss for ``output.prediction`` (B, 1, M, P)."""
        prediction, weight = to_float32(output.prediction[:, 0]), self.config.uniformity_weight
        terms = {"masked_pixels": F.mse_loss(prediction, batch["pixels"])}
        if weight:
            terms["squared_cosine"] = weight * mean_squared_cosine(output.features.pooled)
        return terms

    def visualize(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the image, its kept patches, and these with the predicted others.

        Predictions of standardized patches get the mean and deviation of the true patch, as in the
        figures of the paper.
        """
        images = batch.all_views[0]
        patches = patchify(images, self.patch_size)  # (B, N, P)
        keep, predict = batch["mask"].keep, batch["mask"].predict[:, 0]
        painted = to_float32(output.prediction[:, 0])
        if self.config.normalize_pixels:
            true = gather_tokens(patches, predict)
            variance, mean = torch.var_mean(true, dim=-1, keepdim=True)
            painted = painted * (variance + 1e-6).sqrt() + mean
        kept = gather_tokens(patches, keep)
        masked = torch.zeros_like(patches).scatter(1, keep[..., None].expand_as(kept), kept)
        filled = masked.scatter(1, predict[..., None].expand_as(painted), painted)
        grid = (images.shape[2] // self.patch_size, images.shape[3] // self.patch_size)
        return {
            "image": images,
            "masked": unpatchify(masked, grid, self.patch_size),
            "reconstruction": unpatchify(filled, grid, self.patch_size),
        }

    @property
    def chance_loss(self) -> float | None:
        """Loss of predicting the mean of each patch, its variance: 1, with ``normalize_pixels``.

        None without it, or with ``uniformity_weight``.
        """
        config = self.config
        return 1.0 if config.normalize_pixels and not config.uniformity_weight else None


@in_full_precision
def mean_squared_cosine(features: Tensor) -> Tensor:
    """Return the mean squared cosine of this rank's rows with the rows of all ranks.

    This is U-MAE's term (arXiv:2210.08344). Pairs of a row with itself are included.

    Args:
        features: (B, E).
    """
    units = F.normalize(features, dim=1)
    return (units @ gather_cat_with_grad(units).T).square().mean()


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
    """Return (x - mean) / sqrt(var + 1e-6) of each patch (..., P), as in the authors' code.

    The variance is unbiased: divided by P - 1.
    """
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + 1e-6).sqrt()
