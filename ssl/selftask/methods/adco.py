"""AdCo: contrast with negatives that are trained against the network.

V: queries per image (1, or 2 if symmetric), B: images per rank, D: width of the head, K:
negatives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import all_gather_cat, all_reduce_mean
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import EMATeacher, Schedule, teacher_momentum
from selftask.methods.families.momentum_contrast import MomentumKeys
from selftask.models.losses.contrast import recognition_loss
from selftask.models.precision import to_float32
from selftask.registry import register_method


@register_method("adco")
class AdCo(MomentumKeys, EMATeacher):
    """AdCo (arXiv:2011.08435): MoCo whose negatives are trained to be hard, in place of a queue.

    Loss: ``-log exp(q.k/tau) / (sum_k' exp(q.k'/tau) + sum_n exp(q.n/tau))`` of a query q and its
    key k, over keys k' of the batch and negatives n, which are trained to increase it, at a
    separate temperature (eq. 2).

    Published: ImageNet linear top-1 of ResNet-50 68.6 after 200 epochs, 72.8 after 800 (authors'
    README).

    Use it if MoCo works for you but you want fewer and harder negatives than its queue has.

    Differs from the authors' code:

    * Initial negatives have random directions; in the authors' code they are outputs of the initial
      network.
    * BatchNorm is shuffled as in ``moco``.
    """

    paper = (
        "Hu et al., AdCo: Adversarial Contrast for Efficient Learning of Unsupervised "
        "Representations from Self-Trained Negative Adversaries, CVPR 2021"
    )
    loss_reduction = "gathered"  # the keys of all ranks are candidates

    @dataclass(frozen=True, kw_only=True)
    class Config(MomentumKeys.Config, EMATeacher.Config):
        momentum: Schedule = teacher_momentum(0.999)
        """Momentum of the teacher."""
        temperature: float = setting(0.12, above=0)
        """Temperature of the similarities, tau."""
        symmetric: bool = False
        """Whether both views are queries."""
        num_negatives: int = setting(65_536, min=1, tiny=24)
        """Number of trained negatives, K."""
        negative_temperature: float = setting(0.02, above=0)
        """Temperature of the loss that the negatives increase."""
        negative_lr: float = setting(3.0, min=0)
        """Learning rate of the negatives."""
        negative_sgd_momentum: float = setting(0.9, min=0, max=1)
        """Momentum of the SGD of the negatives."""
        negative_weight_decay: float = setting(1e-4, min=0)
        """Weight decay of the negatives."""

    negatives: Tensor
    """Trained negatives, (K, D); the loss normalizes them."""
    velocity: Tensor
    """Momentum buffer of the negatives' SGD, (K, D)."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.num_queries = 2 if config.symmetric else 1  # V
        shape = config.num_negatives, config.out_dim
        self.register_buffer("negatives", F.normalize(torch.randn(shape), dim=1))
        self.register_buffer("velocity", torch.zeros(shape))

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Use view v as query v; its key is the other view."""
        batch.input = batch.all_views[: self.num_queries]

    def on_forward(self, task: Task) -> None:
        """Compute ``batch["keys"]`` (V, B, D).

        In training, also keep them and the queries for ``step_negatives``.
        """
        batch = task.last_batch
        batch["keys"] = keys = self.unit_keys(batch.all_views[::-1][: self.num_queries])
        if task.train:
            self.pending.append((to_float32(batch.output.detach()), keys))

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss of eq. 2 for ``output`` (V, B, D), averaged over queries."""
        config = self.config
        return adversarial_loss(
            output, batch["keys"], self.negatives, temperature=config.temperature
        )

    def on_update(self, task: Task) -> None:
        """Update the teacher, then move the negatives so that the loss of this step increases."""
        super().on_update(task)
        if pending := self.take_pending():
            self.step_negatives(pending)

    def step_negatives(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        """Take an SGD step on the negatives that increases the loss (eq. 5).

        Args:
            batches: Queries and keys of each batch, (V, B, D) each.
        """
        config = self.config
        with torch.enable_grad():
            negatives = self.negatives.detach().requires_grad_()
            losses = [
                adversarial_loss(queries, keys, negatives, temperature=config.negative_temperature)
                for queries, keys in batches
            ]
            (gradient,) = torch.autograd.grad(torch.stack(losses).mean(), negatives)
        with torch.no_grad():
            gradient = all_reduce_mean(gradient) - config.negative_weight_decay * self.negatives
            self.velocity.mul_(config.negative_sgd_momentum).sub_(gradient)
            self.negatives.sub_(self.velocity, alpha=config.negative_lr)

    @property
    def chance_loss(self) -> float:
        """Loss of equal similarities: ln(batch + ``num_negatives``)."""
        return math.log(self.batch_size + self.config.num_negatives)


def adversarial_loss(
    queries: Tensor, keys: Tensor, negatives: Tensor, *, temperature: float
) -> Tensor:
    """Return the cross-entropy of queries with their keys, among keys of all ranks and negatives.

    Args:
        queries: (V, B, D), not necessarily normalized.
        keys: Unit vectors (V, B, D).
        negatives: (K, D), not necessarily normalized.
        temperature: tau.
    """
    directions = F.normalize(negatives, dim=1)
    losses = [
        recognition_loss(
            query,
            torch.cat([all_gather_cat(key).to(directions.dtype), directions]),
            temperature=temperature,
        )
        for query, key in zip(queries, keys, strict=True)
    ]
    return torch.stack(losses).mean()
