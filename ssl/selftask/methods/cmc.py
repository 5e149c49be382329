"""CMC: recognize an image's color by its lightness, and its lightness by its color.

B: images per rank, K: negatives of an image, D: width of the heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.methods.base import Task
from selftask.methods.families.memory_contrast import MemoryContrast
from selftask.models.backbones.channel_towers import ChannelTowers
from selftask.models.network import Network
from selftask.registry import register_method


@register_method("cmc")
class CMC(MemoryContrast):
    """CMC (arXiv:1906.05849): contrasts the lightness of an image with its colors, in two towers.

    The backbone is a ``channel_towers``: one network sees the channel L of an image in Lab (see the
    transform ``lab``), the other the channels a and b. Evaluations use the features of both.

    Loss: ``-log softmax(l.c/tau)`` of the lightness l of an image with its colors c among those of
    K other images, plus the same for its colors among lightnesses (eq. 2, 3).

    Published: ImageNet linear top-1 of ResNet-50 about 63 (authors' README).

    Use it if channels come from several sensors, or if colors identify the content.

    Differs from the authors' code:

    * Both directions have the same negatives, and an image is never its own negative; the authors'
      code draws from all images. The memory starts with unit vectors; in the authors' code, with
      vectors of about unit length.
    * The default is the softmax of the paper's equation 2; the authors' code uses NCE (``loss:
      nce``). Here its Z is one number for both directions, estimated from negatives alone.
    """

    paper = "Tian et al., Contrastive Multiview Coding, ECCV 2020"
    views = 1
    entry_shape = (2,)  # row v is compared with the output of tower v

    @dataclass(frozen=True, kw_only=True)
    class Config(MemoryContrast.Config):
        loss: Literal["nce", "info_nce"] = "info_nce"
        """How an image is distinguished from its negatives. nce: by noise-contrastive estimation;
        info_nce: by a softmax.
        """
        num_negatives: int = setting(16384, min=1, tiny=16)
        """Number of negatives drawn from the memory bank, K."""

    @staticmethod
    def check_backbone(backbone: nn.Module) -> None:
        """Raise UserError unless the backbone has two towers."""
        if not (isinstance(backbone, ChannelTowers) and len(backbone.towers) == 2):
            raise UserError(
                f"backbone: cmc contrasts the two towers of a channel_towers, not a "
                f"{type(backbone).__name__}; take "
                "{name: channel_towers, towers: [resnet18, resnet18]}"
            )

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Return the backbone with a linear layer for each tower."""
        self.check_backbone(backbone)
        widths: Any = backbone.widths
        return Network(backbone, TowerHeads(widths, self.config.out_dim))

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        batch.input = batch.all_views
        self.draw_negatives(batch, task)

    def entries_of(self, features: Tensor) -> Tensor:
        """Return the outputs of the other tower, (B, 2, D)."""
        return features.flip(1)

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss for ``output`` (1, B, 2, D), summed over both directions."""
        (mean,) = self.contrast(batch, output[0])
        return 2 * mean

    @property
    def chance_loss(self) -> float:
        """Loss of equal similarities: 2 ln(1 + K) with K ``num_negatives``; for NCE
        2 ln(1 + K) + 2 K ln(1 + 1/K).
        """
        return 2 * super().chance_loss


class TowerHeads(nn.Module):
    """A linear layer for each part of concatenated features: (N, sum of widths) -> (N, V, D).

    Args:
        widths: Widths of the V parts.
        out_dim: D.
    """

    def __init__(self, widths: list[int], out_dim: int) -> None:
        super().__init__()
        self.widths = widths
        self.linears = nn.ModuleList([nn.Linear(width, out_dim) for width in widths])

    def forward(self, features: Tensor) -> Tensor:
        parts = zip(self.linears, features.split(self.widths, dim=1), strict=True)
        return torch.stack([linear(part) for linear, part in parts], dim=1)
