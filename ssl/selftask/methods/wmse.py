"""W-MSE: views agree after whitening, which spreads the images of a sub-batch in all directions.

V: views, B: images per rank, N: images of all ranks, D: width of the projector; S: images of a
sub-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import gather_cat_with_grad, world_size
from selftask.methods.base import Method, Task
from selftask.models.heads import mlp
from selftask.models.losses.polar import rounding_of
from selftask.models.precision import in_full_precision
from selftask.random.keyed import batch_uniform
from selftask.registry import register_method


@register_method("wmse")
class WMSE(Method):
    """W-MSE (arXiv:2007.06346): views agree after whitening the images of a sub-batch.

    Loss: ``2 - 2 cos(w1, w2)`` of the whitened features w1 and w2 of two views (eq. 6).

    Use it if neither a teacher nor negatives are wanted, with a narrow head.

    Differs from the authors' code:

    * Sub-batches are taken from the images of all ranks, in an order that is the same on all ranks.
    * ``shrinkage`` is 1e-4; in the authors' code it is 0, which gives NaN if images collapse.
    """

    paper = "Ermolov et al., Whitening for Self-Supervised Representation Learning, ICML 2021"
    loss_reduction = "gathered"  # an image is whitened with those of its sub-batch
    views = (2, None)
    min_batch_size = 2

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(64, min=1, tiny=3)
        """Width of the head's output, D."""
        hidden_dim: int = setting(1024, min=1, tiny=32)
        """Width of the head's hidden layer."""
        sub_batch: int = setting(128, min=2, tiny=lambda batch: batch // 2)
        """Number of images that are whitened together, S; above ``out_dim``, best twice as many."""
        iterations: int = setting(1, min=1)
        """Number of divisions of a batch into sub-batches, over which the loss is averaged."""
        shrinkage: float = setting(1e-4, min=0, max=1)
        """Share of the identity matrix in the covariance, epsilon."""
        normalize: bool = True
        """Whether whitened features are compared by cosine; false: by mean squared difference."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            batch_size = config["train"]["batch_size"]
            if batch_size % self.sub_batch:
                yield (
                    f"sub_batch: {batch_size} images (train.batch_size) cannot be divided into "
                    f"sub-batches of {self.sub_batch}"
                )
            if self.sub_batch <= self.out_dim:
                yield (
                    f"sub_batch: {self.sub_batch} images cannot be white in {self.out_dim} "
                    "dimensions (out_dim); give more, at best twice as many"
                )

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build the head of two layers."""
        return mlp(embed_dim, self.config.hidden_dim, self.config.out_dim)

    def on_forward(self, task: Task) -> None:
        """Draw ``batch["orders"]``, permutations (iterations, N) of the images of all ranks."""
        batch, iterations = task.last_batch, self.config.iterations
        num_images = len(batch.index) * world_size()
        draws = batch_uniform(
            task.config.train.seed, batch.number, iterations * num_images, task.device
        )
        batch["orders"] = draws.view(iterations, num_images).argsort(dim=1, stable=True)

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss of eq. 6 for ``output`` (V, B, D), averaged over pairs and divisions."""
        config = self.config
        return wmse_loss(
            output,
            batch["orders"],
            sub_batch=config.sub_batch,
            shrinkage=config.shrinkage,
            normalize=config.normalize,
        )

    @property
    def chance_loss(self) -> float:
        """Loss of views without correlation: 2."""
        return 2.0


@in_full_precision
def wmse_loss(
    output: Tensor, orders: Tensor, *, sub_batch: int, shrinkage: float, normalize: bool
) -> Tensor:
    """Return the mean distance of whitened views; every rank computes it for all images.

    Each view of each sub-batch is whitened separately.

    Args:
        output: (V, B, D).
        orders: Permutations of the images of all ranks, (iterations, N).
        sub_batch: Size of a sub-batch, S, or all N images if N is smaller. Remaining images that
            fill no sub-batch are ignored.
        shrinkage: Share of the identity matrix in the covariance.
        normalize: Return 2 - 2 cos instead of the mean squared difference.
    """
    rows = gather_cat_with_grad(output.transpose(0, 1))  # (N, V, D)
    size = min(sub_batch, len(rows))
    used = len(rows) // size * size
    groups = rows[orders[:, :used].reshape(-1, size)]  # (G, S, V, D)
    whitened = whiten(groups.transpose(1, 2), shrinkage).transpose(0, 1)  # (V, G, S, D)
    losses = []
    for first, second in itertools.combinations(whitened, 2):
        if normalize:
            losses.append(2 - 2 * F.cosine_similarity(first, second, dim=-1).mean())
        else:
            losses.append(F.mse_loss(first, second))
    return torch.stack(losses).mean()


def whiten(features: Tensor, shrinkage: float) -> Tensor:
    """Return features (..., n, D) whitened over their n rows.

    They are centered and multiplied by the inverse Cholesky factor of their covariance, in which
    the identity has the share ``shrinkage``. If it is 0, the covariance of the result is the
    identity.
    """
    centered = features - features.mean(dim=-2, keepdim=True)
    covariance = centered.mT @ centered / (features.shape[-2] - 1)
    identity = torch.eye(features.shape[-1], dtype=features.dtype, device=features.device)
    shrunk = covariance.lerp(identity, shrinkage) + rounding_of(covariance) * identity
    factor = torch.linalg.cholesky_ex(shrunk).L
    return torch.linalg.solve_triangular(factor, centered.mT, upper=False).mT
