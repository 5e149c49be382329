"""SparK: MAE for convolutional networks, with sparse convolutions and maps of all resolutions.

B: images per rank, C: channels of an image, N = h * w: patches, K: visible patches, p: side of a
patch, which is the total stride of the backbone; E: width of a map.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.methods.base import Task
from selftask.methods.families.masked_patches import MaskedPatches
from selftask.models.features.extract import adapter_of
from selftask.models.features.levels import levels_of
from selftask.models.features.sparse import check_layers, see_visible_patches
from selftask.models.features.tokens import Grid
from selftask.models.features.unet_decoder import UNetDecoder
from selftask.models.masks import hide_patches, masked_mean, split_patches
from selftask.models.network import Network, PatchOutput
from selftask.models.precision import to_float32
from selftask.parallel.sync_batch_norm import has_batch_norm
from selftask.random.keyed import uniform
from selftask.registry import register_method


@register_method("spark")
class SparK(MaskedPatches):
    """SparK (arXiv:2301.03580): masked pretraining of ResNet and ConvNeXt, at all resolutions.

    Convolutions are dense, with zeros at hidden positions, as in the authors' code: the result
    equals that of sparse convolutions, without saving computation.

    Loss: ``mean (x - x')^2`` of the standardized pixels x of hidden patches and their predictions
    x'.

    Use it before fine-tuning ResNet or ConvNeXt.

    Differs from the authors' code:

    * The authors' code adds 1e-8 to the number of masked patches.
    """

    paper = (
        "Tian et al., Designing BERT for Convolutional Networks: Sparse and Hierarchical Masked "
        "Modeling, ICLR 2023"
    )
    requires = ("sparse",)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        mask_ratio: float = setting(0.6, above=0, below=1)
        """Share of the patches that are masked, drawn at random. Their side is the total stride of
        the backbone: 32 pixels for a ResNet-50.
        """
        normalize_pixels: bool = True
        """Whether each target patch is normalized to mean 0 and variance 1."""
        decoder_dim: int = setting(768, min=2, tiny=32)
        """Width of the decoder at the coarsest resolution; halved at each finer one."""
        levels: int = setting(4, min=1)
        """Number of resolutions of the backbone that the decoder receives, from the coarsest."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if config["parallel"]["activation_checkpointing"] != "none":
                yield (
                    "name: parallel.activation_checkpointing must be none, since blocks would be "
                    "recomputed without the mask"
                )

    @staticmethod
    def check_backbone(backbone: nn.Module) -> None:
        check_layers(backbone)

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        self.check_backbone(backbone)
        see_visible_patches(backbone)
        decoder, layers = self.build_decoder(backbone, task.data_module.channels)
        return SparseNetwork(backbone, decoder, layers)

    def build_decoder(self, backbone: nn.Module, channels: int) -> tuple[nn.Module, list[int]]:
        """Return the decoder, and the indices of the hidden layers whose maps it receives.

        Raises UserError if the width of the decoder cannot be halved at each resolution, or the
        stride of the backbone is not a power of 2.
        """
        width, stride = self.config.decoder_dim, adapter_of(backbone).stride
        if stride & (stride - 1) or width % stride:
            raise UserError(
                f"method.decoder_dim={width}: must be divisible by the total stride of the "
                f"backbone, {stride}, which must be a power of 2: the decoder doubles the "
                "resolution and halves its width up to the pixels"
            )
        levels = [level for level in levels_of(backbone, channels) if level.stride > 1]
        levels = levels[: self.config.levels]
        decoder = UNetDecoder(
            [level.width for level in levels],
            dim=width,
            stride=stride,
            channels=channels,
            batch_norm=has_batch_norm(backbone),
        )
        return decoder, [level.layer for level in levels]

    def num_visible(self, num_patches: int) -> int:
        """Return how many of ``num_patches`` are visible, rounded as in the authors' code."""
        return round(num_patches * (1 - self.config.mask_ratio))

    def draw_mask(self, seed: int, key: Tensor, grid: Grid) -> Shown:
        """Draw visible and hidden patches. Raise UserError if none is visible or none is hidden."""
        num_patches = grid[0] * grid[1]
        visible = self.num_visible(num_patches)
        if visible in (0, num_patches):
            raise UserError(
                f"method.mask_ratio={self.config.mask_ratio} hides {num_patches - visible} of the "
                f"{num_patches} patches of an image, whose side is the total stride of the "
                "backbone; take larger images, or a backbone of a smaller stride"
            )
        order = uniform(seed, key, num_patches).argsort(dim=1, stable=True)  # (B, N)
        hidden = torch.ones_like(order).scatter(1, order[:, :visible], 0).bool()
        return Shown(order[:, :visible], hidden.unflatten(1, grid))

    def forward(self, output: PatchOutput, batch: Batch) -> Tensor:
        """Return the mean squared error of ``output.prediction`` (B, C, H, W) at masked patches."""
        (images,), hidden = batch.all_views, batch["mask"].hidden
        target = standardize(images, hidden)[0] if self.config.normalize_pixels else images
        return masked_l2(to_float32(output.prediction), target, hidden)

    def visualize(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the image, its visible patches, and these with the predicted others.

        Predictions of standardized patches get the mean and deviation of the true patch.
        """
        (images,), hidden = batch.all_views, batch["mask"].hidden
        painted = to_float32(output.prediction)
        if self.config.normalize_pixels:
            _, mean, deviation = standardize(images, hidden)
            painted = painted * deviation + mean
        masked = hide_patches(images, hidden.flatten(1))
        painted = masked + hide_patches(painted, ~hidden.flatten(1))
        return {"image": images, "masked": masked, "reconstruction": painted}

    @property
    def chance_loss(self) -> float | None:
        """Loss of predicting the mean of each patch, its variance: 1, with ``normalize_pixels``.

        None without it.
        """
        return 1.0 if self.config.normalize_pixels else None


class Shown(NamedTuple):
    """Patches that the network sees, the same number in each image."""

    visible: Tensor
    """(B, K), indices of the visible patches."""
    hidden: Tensor
    """(B, h, w) bool, True for hidden patches."""


class SparseNetwork(Network):
    """Backbone that sees visible patches only, and a decoder from its feature maps to the image.

    Args:
        backbone: Backbone with ``"sparse"`` in its ``offers``.
        decoder: A list of maps (B, E, ., .), and the fields of ``Shown`` -> images (B, C, H, W).
        layers: Hidden layers whose maps the decoder receives.
    """

    def __init__(self, backbone: nn.Module, decoder: nn.Module, layers: Sequence[int]) -> None:
        super().__init__(backbone, decoder)
        self.layers = tuple(layers)

    def forward(self, inputs: tuple[Tensor, Shown]) -> PatchOutput:  # type: ignore[override]
        images, shown = inputs
        features = self.extract(images, visible=shown.visible, layers=self.layers)
        maps = [features.hidden[layer].map for layer in self.layers]
        return PatchOutput(self.head(maps, *shown), features, shown)


def standardize(images: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Standardize each patch by its mean and standard deviation, over pixels and channels.

    The variance is unbiased, and 1e-6 is added to it.

    Args:
        images: (B, C, H, W).
        hidden: (B, h, w); its shape divides the image into patches.

    Returns:
        Standardized images (B, C, H, W), and the mean and standard deviation of the patch of each
        pixel, (B, 1, H, W) each.
    """
    patches = split_patches(images, hidden)
    variance, mean = torch.var_mean(patches, dim=(1, 3, 5), keepdim=True)
    deviation = (variance + 1e-6).sqrt()
    sides = patches.shape[3], patches.shape[5]
    mean, deviation = (
        x[:, :, :, 0, :, 0].repeat_interleave(sides[0], 2).repeat_interleave(sides[1], 3)
        for x in (mean, deviation)
    )
    return (images - mean) / deviation, mean, deviation


def masked_l2(predicted: Tensor, target: Tensor, hidden: Tensor) -> Tensor:
    """Return the mean of (predicted - target)^2 over the pixels of hidden patches.

    Args:
        predicted: (B, C, H, W).
        target: (B, C, H, W).
        hidden: (B, h, w) bool, the same number in each image.
    """
    return masked_mean((predicted - target).square(), hidden)
