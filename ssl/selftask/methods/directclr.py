"""DirectCLR: contrast the first features of the backbone, without a projector.

B: images per rank, E: features of the backbone, D: features in the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.methods.base import Method
from selftask.models.losses.contrast import gathered_cross_entropy
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("directclr")
class DirectCLR(Method):
    """DirectCLR (arXiv:2110.09348): contrasts the first features of the backbone, without a head.

    The other features are trained through the residual connections of the backbone.

    Loss: ``CE(z1[:D].z2[:D]/tau)`` of the first D features of the views z1 and z2, averaged over
    both directions.

    Use it to study collapse without a projection head.

    Differs from the authors' code:

    * BatchNorm statistics are those of both views together; in the authors' code, those of each
      view.
    """

    paper = (
        "Jing et al., Understanding Dimensional Collapse in Contrastive Self-supervised Learning, "
        "ICLR 2022"
    )
    loss_reduction = "gathered"  # negatives are the images of all ranks
    views = 2
    min_batch_size = 2

    @dataclass(frozen=True, kw_only=True)
    class Config:
        num_features: int = setting(360, min=1, tiny=4)
        """Number of features in the loss, D; the paper has 360 of ResNet-50's 2048."""
        temperature: float = setting(0.1, above=0)
        """Temperature of the similarities."""

    def build_head(self, embed_dim: int) -> nn.Module:
        """Return the identity; raise UserError if the backbone has too few features."""
        if self.config.num_features > embed_dim:
            raise UserError(
                f"method.num_features={self.config.num_features}: the backbone has {embed_dim} "
                "features; give at most as many"
            )
        return nn.Identity()

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return InfoNCE between the views of ``output`` (2, B, E), both directions averaged."""
        return direct_loss(
            output[..., : self.config.num_features], temperature=self.config.temperature
        )

    @property
    def chance_loss(self) -> float:
        """Loss of equal similarities: ln(batch)."""
        return math.log(self.batch_size)


@in_full_precision
def direct_loss(features: Tensor, *, temperature: float) -> Tensor:
    """Return InfoNCE between two views of features (2, B, D), both directions averaged."""
    first, second = F.normalize(features, dim=2)
    both = [
        gathered_cross_entropy(*pair, scale=1 / temperature)
        for pair in ((first, second), (second, first))
    ]
    return (both[0] + both[1]) / 2
