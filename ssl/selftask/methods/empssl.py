"""EMP-SSL: many small crops of an image agree with their mean, and features fill all directions.

V: views, B: images per rank, D: width of the projector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.families.projected import Projected
from selftask.models.losses.coding_rate import coding_rate
from selftask.models.precision import in_full_precision, to_float32
from selftask.registry import register_method


@register_method("empssl")
class EMPSSL(Projected):
    """EMP-SSL (arXiv:2304.03977): many crops agree with their mean, at a large coding rate.

    An epoch of V views costs as much as V / 2 epochs of a method with two views.

    Loss: ``-mean_v (1/2) ln det(I + D/(n eps) Z_v' Z_v) - lambda mean_v cos(z_v, mean)`` of the
    unit vectors Z_v (n, D) of n images in view v, their rows z_v, and the mean of these over views
    (eq. 4, negated). The coding rate is maximized; in lightly's loss it has the opposite sign.

    Use it with few images and enough time for many crops of each.

    Differs from the authors' code:

    * Coding rates are over the images of all ranks; in the authors' code each GPU has its own.
    * Evaluations use the backbone's features of one crop; the authors' code also evaluates the
      first layer of the head, averaged over many crops.
    """

    paper = "Tong et al., EMP-SSL: Towards Self-Supervised Learning in One Training Epoch, 2023"
    columns = {
        "invariance": "Term of the loss: two views have the same embedding.",
        "coding_rate": "Term of the loss: minus the coding rate; features fill all directions.",
    }
    loss_reduction = "statistics"  # coding rates
    views = (2, None)
    min_batch_size = 2
    head_options = {"bias": False}

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(1024, min=1, tiny=12)
        """Width of the head's output, D."""
        hidden_dim: int = setting(4096, min=1, tiny=32)
        """Width of the projector's two hidden layers."""
        invariance_weight: float = setting(200.0, min=0)
        """Weight of the agreement of views with their mean, lambda."""
        epsilon: float = setting(0.2, above=0)
        """Squared distortion of the coding rate."""

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the weighted terms of eq. 4, negated, for ``output`` (V, B, D)."""
        units = F.normalize(to_float32(output), dim=2)
        return {
            "invariance": -self.config.invariance_weight * agreement(units),
            "coding_rate": -coding_rate(units, epsilon=self.config.epsilon).mean(),
        }


@in_full_precision
def agreement(views: Tensor) -> Tensor:
    """Return the mean cosine of views (V, B, D) with their mean; gradients flow through both."""
    return F.cosine_similarity(views, views.mean(dim=0, keepdim=True), dim=2).mean()
