"""MFM: remove the high or the low frequencies of an image, and predict them.

B: images per rank, C: channels, H, W: size of the images in pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import all_reduce_mean
from selftask.errors import UserError
from selftask.methods.base import Task
from selftask.methods.families.view_pixels import ViewPixels, require_stride
from selftask.models.build import embed_dim
from selftask.models.features.extract import adapter_of
from selftask.models.frequencies import low_frequencies, without
from selftask.models.heads import pixel_decoder
from selftask.models.network import MapNetwork, PatchOutput
from selftask.models.precision import to_float32
from selftask.random.keyed import uniform
from selftask.registry import register_method


@register_method("mfm")
class MFM(ViewPixels):
    """MFM (arXiv:2206.07706): predicts the frequencies that were removed from an image.

    Loss: ``|F(x) - F(x')|`` of the Fourier transforms F of an image x and its prediction x', at the
    frequencies that were removed (eq. 4).

    Published: ImageNet fine-tuned top-1 after 300 epochs of ViT-B 83.1, ResNet-50 80.1 (authors'
    README).

    Use it before fine-tuning a convolutional network or a transformer, with the same task.
    """

    paper = (
        "Xie et al., Masked Frequency Modeling for Self-Supervised Visual Pre-Training, ICLR 2023"
    )
    loss_reduction = "statistics"  # the number of removed frequencies
    sample_dim = 0
    views = 1
    requires = ("dense",)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        radius: int = setting(16, min=1, tiny=4)
        """Limit of the low frequencies, in periods per image."""
        low_share: float = setting(0.5, min=0, max=1)
        """Probability that an image keeps its low frequencies; otherwise it keeps the high ones."""

    @staticmethod
    def check_backbone(backbone: nn.Module) -> None:
        """Raise UserError if the stride of the backbone's map is not known."""
        require_stride(backbone, "pixels")

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Return the backbone and a linear layer that predicts the pixels of each map location."""
        self.check_backbone(backbone)
        self.read_moments(task)
        stride, channels = adapter_of(backbone).stride, task.data_module.channels
        return MapNetwork(backbone, pixel_decoder(embed_dim(backbone), channels, stride))

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Set the input to images without their low or high frequencies.

        Sets ``batch["removed"]`` (B, H, W) bool, True for removed frequencies, in the order of
        ``torch.fft``.

        Raises:
            UserError: If the images have no high frequencies.
        """
        (images,) = batch.all_views
        key = batch.key.to(images.device, non_blocking=True)
        is_low = uniform(task.config.train.seed, key, 1)[:, 0] < self.config.low_share
        height, width = images.shape[-2:]
        if self.config.radius**2 > (height // 2) ** 2 + (width // 2) ** 2:
            raise UserError(
                f"method.radius={self.config.radius}: all frequencies of views of {height}x{width} "
                "pixels are below it; the paper has 16 for 224 pixels"
            )
        disc = low_frequencies((height, width), self.config.radius, images.device)
        batch["removed"] = disc ^ is_low[:, None, None]  # (B, H, W)
        filtered = remove(images * self.std + self.mean, batch["removed"])
        batch.input = (filtered - self.mean) / self.std

    def forward(self, output: PatchOutput, batch: Batch) -> Tensor:
        """Return the distance of the removed frequencies of prediction and image (eq. 4).

        ``output.prediction`` is (B, C, H, W).
        """
        (images,) = batch.all_views
        return frequency_distance(to_float32(output.prediction), images, batch["removed"])

    def visualize(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the image, its remaining frequencies, and the prediction."""
        (images,) = batch.all_views
        return {"image": images, "filtered": batch.input, "prediction": output.prediction}


def remove(pixels: Tensor, removed: Tensor) -> Tensor:
    """Set frequencies of images to zero, and clamp the resulting pixels to [0, 1].

    Args:
        pixels: (B, C, H, W), in [0, 1].
        removed: (B, H, W) bool, True for frequencies to remove.
    """
    return without(to_float32(pixels), removed).real.clamp(0, 1)


def frequency_distance(predicted: Tensor, images: Tensor, removed: Tensor) -> Tensor:
    """Return the mean distance in the complex plane of the removed frequencies of two images.

    Averaged over ranks, it is a mean over channels and over the removed frequencies of the images
    of all ranks, so the weight of an image is its number of removed frequencies. The FFT is
    orthonormal.

    Args:
        predicted: (B, C, H, W).
        images: (B, C, H, W).
        removed: (B, H, W) bool.
    """
    difference = torch.fft.fft2(predicted - images, norm="ortho")
    distance = (difference.real.square() + difference.imag.square() + 1e-12).sqrt()
    number = all_reduce_mean(removed.sum().to(distance.dtype))
    return (distance.mean(dim=1) * removed).sum() / number
