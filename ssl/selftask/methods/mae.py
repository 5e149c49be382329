"""MAE: see a quarter of an image's patches and paint the others.

He et al., Masked Autoencoders Are Scalable Vision Learners, CVPR 2022, arXiv:2111.06377.

B: images per rank, N: patches of an image, K kept and M masked ones, P: numbers in a patch (its
pixels times the channels), E: width of the backbone, T: its prefix tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.methods.base import Method
from selftask.models.masked_vit import (
    PatchPredictor,
    as_vit,
    encode,
    fix_sincos_positions,
    gather_tokens,
    num_patches,
    patch_tokens,
    patchify,
)
from selftask.models.network import Network
from selftask.models.precision import to_float32
from selftask.random.keyed import uniform
from selftask.registry import register_method

if TYPE_CHECKING:
    from selftask.task import Task


@register_method("mae")
class MAE(Method):
    """The backbone sees only what is left; a light decoder, thrown away later, paints the rest."""

    loss_reduction = "samples"
    views = 1
    requires = ("tokens",)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        mask_ratio: float = 0.75  # of the patches; random ones
        normalize_pixels: bool = True  # each patch to mean 0 and variance 1: table 1d
        decoder_dim: int = setting(512, min=1, tiny=16)  # width
        decoder_depth: int = setting(8, min=1, tiny=1)  # blocks
        decoder_heads: int = setting(16, min=1, tiny=2)

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            backbone = config["backbone"]
            if backbone.get("dynamic_img_size"):
                yield "backbone.dynamic_img_size: mae needs a fixed grid; set it to false"
            if not 0 < self.mask_ratio < 1:
                yield f"mask_ratio: {self.mask_ratio}; a share between 0 and 1 is expected"
            if self.decoder_dim % 4 or self.decoder_dim % self.decoder_heads:
                yield (
                    f"decoder_dim: {self.decoder_dim} must be divisible by 4 (its positions) and "
                    f"by decoder_heads={self.decoder_heads}"
                )

    @staticmethod
    def check_backbone(backbone: nn.Module) -> None:
        as_vit(backbone, method="mae")

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Positions are fixed and weights drawn as in the paper, unless they were loaded."""
        config = self.config
        vit = as_vit(backbone, method="mae")
        self.num_patches = num_patches(vit)
        self.num_keep = int(self.num_patches * (1 - config.mask_ratio))
        if self.num_keep == self.num_patches:
            raise UserError(
                f"method.mask_ratio={config.mask_ratio} hides none of the {self.num_patches} "
                "patches of an image; raise it"
            )
        if self.num_keep == 0:
            raise UserError(
                f"method.mask_ratio={config.mask_ratio} hides all {self.num_patches} patches of an "
                "image; lower it, or take a smaller backbone.patch_size"
            )
        self.patch_size = vit.patch_embed.patch_size[0]
        decoder = PatchPredictor(
            vit,
            dim=config.decoder_dim,
            depth=config.decoder_depth,
            num_heads=config.decoder_heads,
            num_out=vit.patch_embed.proj.in_channels * self.patch_size**2,
        )
        initialize(decoder)
        if task.config.init.backbone is None:
            fix_sincos_positions(vit)
            initialize(vit)
        return MaskedAutoencoder(vit, decoder)

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """The patches with the lowest draws are kept; ``batch["masked"]`` (B, M) are not."""
        (images,) = batch.all_views
        key = batch.key.to(images.device, non_blocking=True)
        draws = uniform(task.config.train.seed, key, self.num_patches)  # (B, N)
        order = draws.argsort(dim=1, stable=True)
        keep, masked = order[:, : self.num_keep], order[:, self.num_keep :]
        batch["masked"] = masked
        batch.input = (images, keep, masked)

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        batch = task.last_batch
        patches = patchify(batch.all_views[0], self.patch_size)  # (B, N, P)
        pixels = gather_tokens(patches, batch["masked"])  # (B, M, P)
        batch["pixels"] = normalize(pixels) if self.config.normalize_pixels else pixels

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Mean squared error over the masked patches only; ``output`` (B, M, P)."""
        return F.mse_loss(to_float32(output), batch["pixels"])

    @property
    def chance_loss(self) -> float | None:
        """Every pixel painted as its patch's mean: the variance, 1 unless a patch is flat."""
        return 1.0 if self.config.normalize_pixels else None


class MaskedAutoencoder(Network):
    """Backbone over the kept patches, then the decoder: (images, keep, masked) -> (B, M, P)."""

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        images, keep, masked = inputs
        vit = as_vit(self.backbone, method="mae")
        encoded = encode(vit, patch_tokens(vit, images), keep)  # (B, T + K, E)
        self.embedding = encoded.mean(dim=1).detach()
        painted: Tensor = self.head(encoded, keep, masked[:, None])  # (B, 1, M, P)
        return painted[:, 0]


def normalize(patches: Tensor) -> Tensor:
    """Each patch (..., P) less its mean, over its deviation (the unbiased one, as published)."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + 1e-6).sqrt()


@torch.no_grad()
def initialize(module: nn.Module) -> None:
    """Xavier's uniform weights for linear layers and patches (appendix A.1), as in the code.

    Biases are zero, but for that of the patches, which stays as it was drawn.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(part.weight.view(len(part.weight), -1))
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)
    token = getattr(module, "cls_token", None)
    if token is not None:
        nn.init.normal_(token, std=0.02)
