"""Shuffled-DBN: views agree after whitening random groups of features.

V: views, B: images per rank, D: width of the projector; G: groups of features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import sum_with_grad, world_size
from selftask.methods.base import Method, Task
from selftask.models.heads import mlp
from selftask.models.losses.polar import inverse_root, rounding_of
from selftask.models.precision import in_full_precision
from selftask.random.keyed import batch_uniform
from selftask.registry import register_method


@register_method("shuffled_dbn")
class ShuffledDBN(Method):
    """Shuffled-DBN (arXiv:2105.00470): two views agree after whitening random groups of features.

    Loss: ``2 - 2 cos(w1, w2)`` of the features w1 and w2 of two views, whitened in random groups.

    Use it if no teacher, predictor or negatives are wanted.

    Differs from the authors' code:

    * Whitened features are compared as unit vectors; in the authors' code without normalization, by
      ``|w1 - w2|^2``.
    * Means and covariances are over the images of all ranks, and ``epsilon`` is added to variances;
      in the authors' code it is 0.
    """

    paper = "Hua et al., On Feature Decorrelation in Self-Supervised Learning, ICCV 2021"
    loss_reduction = "statistics"  # means and covariances
    views = 2
    per_view = True
    min_batch_size = 2

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(256, min=1, tiny=8)
        """Width of the head's output, D."""
        hidden_dim: int = setting(2048, min=1, tiny=32)
        """Width of the projector's hidden layer."""
        group_width: int = setting(64, min=1, tiny=2)
        """Number of features that are whitened together; a divisor of ``out_dim``."""
        shuffle: bool = True
        """Whether features are shuffled before they are grouped, in another order at each step."""
        epsilon: float = setting(1e-6, above=0)
        """Number added to variances; if it is not much smaller than the variances, features may
        collapse to few directions.
        """

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if self.out_dim % self.group_width:
                yield (
                    f"group_width: {self.out_dim} features (out_dim) cannot be divided into "
                    f"groups of {self.group_width}"
                )

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build the projector of two layers."""
        return mlp(embed_dim, self.config.hidden_dim, self.config.out_dim, last_bias=False)

    def on_forward(self, task: Task) -> None:
        """Set ``batch["order"]``, an order (D,) of the features, the same on all ranks.

        With ``shuffle`` it is drawn anew in each step; otherwise it is the order of the output.
        """
        batch, dim = task.last_batch, self.config.out_dim
        batch["order"] = torch.arange(dim, device=task.device)
        if self.config.shuffle:
            draws = batch_uniform(task.config.train.seed, batch.number, dim, task.device)
            batch["order"] = draws.argsort(stable=True)

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return 2 - 2 cos of both views of ``output`` (2, B, D) after whitening."""
        groups = batch["order"].view(-1, self.config.group_width)
        white = whiten_groups(output, groups, epsilon=self.config.epsilon)
        return 2 - 2 * F.cosine_similarity(white[0], white[1], dim=-1).mean()

    @property
    def chance_loss(self) -> float:
        """Loss of views without correlation: 2."""
        return 2.0


@in_full_precision
def whiten_groups(features: Tensor, groups: Tensor, *, epsilon: float) -> Tensor:
    """Return features whitened in each group (ZCA), over the images of all ranks.

    Args:
        features: (V, B, D); each view has its own statistics.
        groups: Indices of the features of each group, (G, D / G).
        epsilon: Added to variances.

    Returns:
        Tensor (V, B, D), in the order of the groups.
    """
    num_images = features.shape[1] * world_size()
    grouped = features[:, :, groups].transpose(1, 2)  # (V, G, B, D / G)
    centered = grouped - sum_with_grad(grouped.sum(dim=2, keepdim=True)) / num_images
    covariance = sum_with_grad(centered.mT @ centered) / num_images
    identity = torch.eye(groups.shape[1], dtype=features.dtype, device=features.device)
    added = epsilon + rounding_of(covariance)  # rounding may exceed epsilon
    white = centered @ inverse_root(covariance + added * identity)
    return white.transpose(1, 2).flatten(2)
