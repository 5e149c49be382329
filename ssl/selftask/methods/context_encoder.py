"""Context encoders: hide the center of an image, and predict its pixels.

B: images per rank, C: channels, S: side of the center in pixels, E: width of the backbone; h, w:
rows and columns of a map.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.methods.base import Method, Task
from selftask.methods.families.view_pixels import require_stride
from selftask.models.build import embed_dim
from selftask.models.features.extract import adapter_of
from selftask.models.heads import transposed_decoder
from selftask.models.network import MapNetwork, PatchOutput
from selftask.models.precision import to_float32
from selftask.registry import register_method


@register_method("context_encoder")
class ContextEncoder(Method):
    """Context Encoders (arXiv:1604.07379): predicts the hidden center of an image.

    Only the reconstruction loss is used. The paper's adversarial loss, of weight 0.001, would need
    a discriminator with a second optimizer.

    Loss: ``mean w (x - x')^2`` of the pixels x of the center and their predictions x'; the weight w
    is 10 where the prediction overlaps with visible pixels, and 1 elsewhere (eq. 1).

    Published: mean average precision on PASCAL VOC 2007 of AlexNet, fine-tuned, 56.5 (paper).

    Use it as a baseline with one view of each image.

    Differs from the authors' code:

    * There is no adversarial loss.
    * Hidden pixels are 0 in normalized images; in the authors' code, the mean color of ImageNet.
    * Any backbone can be used, with the paper's channel-wise layer; the authors' network has a
      bottleneck of one vector, and a tanh after the last layer.
    """

    paper = "Pathak et al., Context Encoders: Feature Learning by Inpainting, CVPR 2016"
    loss_reduction = "samples"
    sample_dim = 0
    views = 1
    requires = ("dense",)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        center_size: int = setting(64, min=2)
        """Side S of the predicted square in pixels, half the side of the images."""
        overlap: int = setting(4, min=0)
        """Width of the visible border inside the predicted square, in pixels."""
        overlap_weight: float = setting(10.0, min=0)
        """Weight of the visible border in the loss."""
        decoder_dim: int = setting(256, min=1, tiny=16)
        """Width of the decoder."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if 2 * self.overlap >= self.center_size:
                yield (
                    f"overlap: a border of {self.overlap} pixels on each side leaves nothing to "
                    f"hide of center_size={self.center_size}; take less than half"
                )

    weights: Tensor  # (S, S), of the pixels in the loss

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        weights = torch.full((config.center_size, config.center_size), config.overlap_weight)
        self.hidden_size = config.center_size - 2 * config.overlap
        center(weights, self.hidden_size).fill_(1.0)
        self.register_buffer("weights", weights, persistent=False)

    @staticmethod
    def check_backbone(backbone: nn.Module) -> None:
        """Raise UserError unless the stride of the backbone's map is a power of 2."""
        require_stride(backbone, "pixels")
        stride = adapter_of(backbone).stride
        if stride & (stride - 1):
            raise UserError(
                f"backbone: a map of stride {stride} cannot be doubled to the size of the image; "
                "take a backbone whose stride is a power of 2, such as patch_size: 16"
            )

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Return the backbone, and a decoder from its map to the pixels of the center.

        Raises:
            UserError: If the stride of the backbone's map is not known or no power of 2, or if
                ``center_size`` is not a multiple of it.
        """
        self.check_backbone(backbone)
        size, stride = self.config.center_size, adapter_of(backbone).stride
        side = size // stride
        if size % stride:
            raise UserError(
                f"method.center_size={size}: the backbone has one position for each {stride} "
                "pixels; set it to a multiple, and the size of views to twice that"
            )
        width, dim = embed_dim(backbone), self.config.decoder_dim
        decoder = nn.Sequential(
            ChannelwiseLinear(width, (2 * side, 2 * side), (side, side)),
            nn.Conv2d(width, dim, 1, bias=False),
            nn.BatchNorm2d(dim),
            nn.ReLU(),
            *transposed_decoder(dim, dim, task.data_module.channels, stride=stride),
        )
        return MapNetwork(backbone, decoder)

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Set the input to images whose center, without a border of ``overlap`` pixels, is 0.

        Raises:
            UserError: If a side of the views is not 2 * ``center_size``.
        """
        (images,) = batch.all_views
        size = self.config.center_size
        if images.shape[2:] != (2 * size, 2 * size):
            height, width = images.shape[2:]
            raise UserError(
                f"method.center_size={size}: it is half of the side of the images, and views have "
                f"{height}x{width} pixels"
            )
        batch.input = images.clone()
        center(batch.input, self.hidden_size).zero_()

    def forward(self, output: PatchOutput, batch: Batch) -> Tensor:
        """Return the weighted mean squared error of ``output.prediction`` (B, C, S, S)."""
        (images,) = batch.all_views
        target = center(images, self.config.center_size)
        return (self.weights * (to_float32(output.prediction) - target).square()).mean()

    def visualize(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the image, its visible pixels, and these with the predicted center."""
        (images,) = batch.all_views
        painted = images.clone()
        center(painted, self.config.center_size).copy_(output.prediction)
        return {"image": images, "masked": batch.input, "reconstruction": painted}


def center(images: Tensor, size: int) -> Tensor:
    """Return the central square of images (..., H, W) without a copy: (..., ``size``, ``size``)."""
    top, left = ((side - size) // 2 for side in images.shape[-2:])
    return images[..., top : top + size, left : left + size]


class ChannelwiseLinear(nn.Module):
    """A linear layer for each channel of a map, between all positions (section 3.1).

    Args:
        channels: Number of channels, E.
        grid: Rows and columns (h, w) of the map.
        out_grid: Rows and columns (h', w') of the result.

    Shape:
        (B, E, h, w) -> (B, E, h', w').
    """

    def __init__(self, channels: int, grid: tuple[int, int], out_grid: tuple[int, int]) -> None:
        super().__init__()
        self.out_grid = out_grid
        num_in, num_out = math.prod(grid), math.prod(out_grid)
        bound = num_in**-0.5  # as nn.Linear
        weight = torch.empty(channels, num_out, num_in).uniform_(-bound, bound)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(channels, num_out))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.einsum("bcn,cmn->bcm", x.flatten(2), self.weight) + self.bias
        return rows.unflatten(2, self.out_grid)
