"""CLSA: MoCo with strongly augmented views, which learn the similarities of a weakly augmented one.

S: strong views of an image, B: images per rank, W: ranks, D: width of the head, K: length of the
queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema import num_views
from selftask.distributed.collectives import all_gather_cat
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import EMATeacher, Schedule, teacher_momentum
from selftask.methods.families.momentum_contrast import MomentumContrast
from selftask.models.feature_queue import FeatureQueue
from selftask.models.losses.contrast import recognition_loss
from selftask.models.losses.relations import relation_cross_entropy
from selftask.registry import register_method

NUM_WEAK = 2  # a query and its key


@register_method("clsa")
class CLSA(MomentumContrast, EMATeacher):
    """CLSA (arXiv:2104.07713): MoCo whose stronger views learn the similarities of a weaker one.

    The first two views are weak: a query and its key. All others are strong.

    Loss: ``InfoNCE + alpha sum_strong -sum_i p_i log q_i`` with similarities p of the weak view and
    q of a strong one (eq. 6).

    Published: ImageNet linear top-1 of ResNet-50 69.4 after 200 epochs, 72.2 after 800, with one
    strong view (authors' README).

    Use it if stronger augmentation is wanted but makes MoCo worse.

    Differs from the authors' code:

    * BatchNorm is shuffled as in ``moco``.
    """

    paper = "Wang and Qi, Contrastive Learning with Stronger Augmentations, 2021"
    columns = {
        "weak": "Term of the loss: the weak view recognizes its key.",
        "strong": "Term of the loss: strong views have the similarities of the weak one.",
    }
    loss_reduction = "gathered"  # the keys of all ranks are candidates
    views = (3, None)

    @dataclass(frozen=True, kw_only=True)
    class Config(MomentumContrast.Config, EMATeacher.Config):
        momentum: Schedule = teacher_momentum(0.999)
        """Momentum of the teacher."""
        strong_temperature: float = setting(0.2, above=0)
        """Temperature of the similarities in the term of strong views, for both kinds of views."""
        strong_weight: float = setting(1.0, min=0)
        """Weight of the term of strong views, alpha."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.queue = FeatureQueue(config.queue_size, config.out_dim)

    def setup(self, task: Task) -> None:
        super().setup(task)
        self.num_strong = sum(num_views(task.config.views).values()) - NUM_WEAK  # S

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Pass the first weak view and the strong ones to the network."""
        query, _, *strong = batch.all_views
        batch.input = [query, *strong]

    def on_forward(self, task: Task) -> None:
        """Compute ``batch["keys"]`` (B, D) of the second weak view, enqueued after the step."""
        batch = task.last_batch
        (batch["keys"],) = self.unit_keys(batch.all_views[1:NUM_WEAK])  # (B, D)
        if task.train:
            self.pending.append((batch["keys"],))

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the terms of eq. 6 for ``output`` (1 + S, B, D), summed over strong views."""
        config, rows = self.config, self.queue.rows
        candidates = torch.cat([all_gather_cat(batch["keys"]).to(rows.dtype), rows])  # (WB + K, D)
        strong = relation_cross_entropy(
            output[1:],
            output[0],
            candidates,
            temperature=config.strong_temperature,
            target_temperature=config.strong_temperature,
        )
        return {
            "weak": recognition_loss(output[0], candidates, temperature=config.temperature),
            "strong": config.strong_weight * (len(output) - 1) * strong,
        }

    @property
    def chance_loss(self) -> float:
        """Loss of equal similarities: (1 + ``strong_weight`` * strong views) * ln(batch +
        ``queue_size``).
        """
        terms = 1 + self.config.strong_weight * self.num_strong
        return terms * math.log(self.batch_size + self.config.queue_size)
