"""MoCo v2: contrast a query and its key with a queue of older keys.

v1 is He et al., Momentum Contrast for Unsupervised Visual Representation Learning, CVPR 2020,
arXiv:1911.05722. Equation and section numbers refer to v1.

B: images per rank, W: ranks, V: queries per image (1, or 2 if symmetric), D: width of the head,
K: length of the queue, M: mixed negatives of a query.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.batch import Batch, Loss
from selftask.config.values.duration import steps_in
from selftask.methods.base import Task
from selftask.methods.families.consistency import ConsistencyConfig
from selftask.methods.families.ema_teacher import EMATeacher, Schedule, teacher_momentum
from selftask.methods.families.hard_mixing import HardMixingConfig
from selftask.methods.families.momentum_contrast import MomentumContrast
from selftask.models.feature_queue import FeatureQueue
from selftask.models.losses.contrast import info_nce
from selftask.models.precision import in_full_precision, to_float32
from selftask.random.keyed import uniform
from selftask.registry import register_method


@register_method("moco")
class MoCo(MomentumContrast, EMATeacher):
    """MoCo v2 (arXiv:2003.04297): recognizes the other view among a queue of older images.

    ``consistency_weight`` adds the term of CO2 (arXiv:2010.02217), ``mix_pairs`` and
    ``mix_queries`` the mixed negatives of MoCHi (arXiv:2010.01028).

    Loss: ``-log exp(q.k/tau) / (exp(q.k/tau) + sum_n exp(q.n/tau))`` of a query q and its key k,
    over the entries n of the queue (eq. 1).

    Published: ImageNet linear top-1 of ResNet-50 67.5 after 200 epochs, 71.1 after 800 (authors'
    README).

    Use it for contrastive learning with small batches, since the negatives come from the queue.

    Differs from the authors' code:

    * BatchNorm is shuffled by giving each rank every W-th image of the batch, which is already in
      random order, instead of by another permutation.
    """

    paper = "Chen et al., Improved Baselines with Momentum Contrastive Learning, 2020"

    columns = {
        "recognition": "Term of the loss: recognizing the other view, without CO2's term.",
        "consistency": "Term of the loss: similarity to the same negatives (CO2).",
    }

    num_mixed = 0
    """Number of mixed negatives of a query at this step, M."""

    @dataclass(frozen=True, kw_only=True)
    class Config(MomentumContrast.Config, EMATeacher.Config, ConsistencyConfig, HardMixingConfig):
        momentum: Schedule = teacher_momentum(0.999)
        """Momentum of the teacher, m in eq. 2."""
        symmetric: bool = False
        """Whether both views are queries, each with its own queue (v2+)."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            yield from super().problems(config)
            yield from self.mixing_problems(self.queue_size)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.num_queries = 2 if config.symmetric else 1  # V
        self.queue = FeatureQueue(config.queue_size, self.num_queries, config.out_dim)

    def setup(self, task: Task) -> None:
        super().setup(task)
        self.mix_start = steps_in(self.config.mix_start, task.length)

    def draw(self, seed: int, key: Tensor, sizes: list[tuple[int, int]]) -> Tensor | None:
        """Draw numbers for the mixed negatives, (B, V * ``num_draws``); None if there are none."""
        count = self.num_queries * self.config.num_draws
        return uniform(seed, key, count) if count else None

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Use view v as query v; its key is the other view."""
        batch.input = batch.all_views[: self.num_queries]

    def on_forward(self, task: Task) -> None:
        """Compute keys and mixed negatives; the keys are enqueued after the step.

        Sets ``batch["keys"]`` (V, B, D), and ``batch["mixed"]`` (V, B, M, D) or None.
        """
        batch = task.last_batch
        batch["mixed"] = mixed = self._mixed(batch, task)
        self.num_mixed = 0 if mixed is None else self.config.num_mixed
        batch["keys"] = keys = self.unit_keys(batch.all_views[::-1][: self.num_queries])
        if task.train:
            self.pending.append((keys.transpose(0, 1),))  # (B, V, D)

    @torch.no_grad()
    def _mixed(self, batch: Batch, task: Task) -> Tensor | None:
        """Return the mixed negatives (V, B, M, D), or None without any."""
        if not self.config.num_mixed or task.steps_done < self.mix_start:
            return None
        queries = F.normalize(to_float32(batch.output), dim=2)  # (V, B, D)
        draws = self.drawn(batch, task).chunk(self.num_queries, dim=1)
        return self.config.mixed(queries, self.queue.rows.transpose(0, 1), torch.stack(draws))

    def forward(self, output: Tensor, batch: Batch) -> Loss:
        """Return the loss of eq. 1 for ``output`` (V, B, D), averaged over queries.

        With ``consistency_weight`` CO2's term is added, and both are returned by name.
        """
        keys, queue = batch["keys"], self.queue.rows.transpose(0, 1)  # (V, B, D), (V, K, D)
        loss = info_nce(output, keys, queue, batch["mixed"], temperature=self.config.temperature)
        if not self.config.consistency_weight:
            return loss
        return self.config.with_consistency(loss, *queue_cosines(output, keys, queue))

    @property
    def chance_loss(self) -> float:
        """Loss of equal similarities: ln(1 + ``queue_size`` + mixed negatives)."""
        return math.log(1 + self.config.queue_size + self.num_mixed)


@in_full_precision
def queue_cosines(output: Tensor, keys: Tensor, queue: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines of queries, and of their keys, with the queue, (VB, K) each.

    Args:
        output: (V, B, D), not necessarily normalized.
        keys: (V, B, D), unit vectors.
        queue: (V, K, D), unit vectors.
    """
    units, rows = F.normalize(output, dim=2), queue.transpose(1, 2)
    return (units @ rows).flatten(0, 1), (keys @ rows).flatten(0, 1)
