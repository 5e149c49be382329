"""IIC: maximize the mutual information between the predicted classes of two views of an image.

V: views, B: images per rank, E: width of the backbone, S: heads, K: classes, which are unrelated to
labels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import sum_with_grad, world_size
from selftask.methods.base import Method
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("iic")
class IIC(Method):
    """IIC (arXiv:1807.06653): maximizes the mutual information of the classes of two views.

    Loss: ``-sum_ij P_ij (ln P_ij - lambda ln P_i - lambda ln P_j)`` of the joint distribution P of
    the classes i and j of two views and its marginals; lambda is ``spread`` (eq. 3, where it is 1).

    Use it to get clusters of about equal size as outputs; results vary with the seed.

    Differs from the authors' code:

    * There is one set of heads; the authors' code trains a second set, with more classes, in every
      other epoch. The gradients of the second set train the features, so use its number of classes.
    * The joint distribution is that of the images of all ranks.
    """

    paper = (
        "Ji et al., Invariant Information Clustering for Unsupervised Image Classification and "
        "Segmentation, ICCV 2019"
    )
    loss_reduction = "statistics"  # joint distribution of the classes
    views = (2, None)
    min_batch_size = 2

    @dataclass(frozen=True, kw_only=True)
    class Config:
        num_classes: int = setting(70, min=2, tiny=6)
        """Number of classes, K."""
        num_heads: int = setting(5, min=1, tiny=2)
        """Number of heads, S, each with its own classes; the loss is a mean over heads."""
        spread: float = setting(1.0, min=1)
        """Weight of the two entropies, lambda; more than 1 favors classes of equal size."""

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build S linear layers: (B, E) -> logits (B, S, K)."""
        heads, classes = self.config.num_heads, self.config.num_classes
        return nn.Sequential(
            nn.Linear(embed_dim, heads * classes), nn.Unflatten(1, (heads, classes))
        )

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss between the first and each later view, averaged over views and heads.

        ``output`` is (V, B, S, K).
        """
        return mutual_information_loss(output, spread=self.config.spread)

    @property
    def chance_loss(self) -> float | None:
        """Loss of one class for all images: 0."""
        return 0.0


@in_full_precision
def mutual_information_loss(output: Tensor, *, spread: float) -> Tensor:
    """Return minus the mutual information between the classes of the first view and a later one.

    It is a mean over later views and heads. With ``spread`` 1, its lowest value is -ln K.

    Args:
        output: Logits (V, B, S, K).
        spread: Weight of the marginal entropies, lambda.
    """
    p = F.softmax(output, dim=3)
    joint = torch.einsum("bsi,vbsj->vsij", p[0], p[1:]) / p.shape[1]
    joint = sum_with_grad(joint) / world_size()
    joint = (joint + joint.mT) / 2  # (V - 1, S, K, K)
    # A probability below the machine's epsilon has no gradient, as published.
    tiny = torch.finfo(joint.dtype).eps
    marginal = joint.sum(dim=3).clamp(min=tiny).log()
    log_joint = joint.clamp(min=tiny).log()
    surprise = log_joint - spread * (marginal[..., None] + marginal[..., None, :])
    return -(joint.clamp(min=tiny) * surprise).sum(dim=(2, 3)).mean()
