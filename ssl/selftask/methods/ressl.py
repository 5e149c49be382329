"""ReSSL: learn, from strong views, a teacher's similarities of a weak view to older images.

V: strong views of an image, B: images per rank, D: width of the head, K: length of the queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import EMATeacher, Schedule, teacher_momentum
from selftask.methods.families.momentum_contrast import MomentumContrast
from selftask.models.feature_queue import FeatureQueue
from selftask.models.losses.relations import relation_cross_entropy
from selftask.registry import register_method


@register_method("ressl")
class ReSSL(MomentumContrast, EMATeacher):
    """ReSSL (arXiv:2107.09282): learns a teacher's similarities of images, with weak augmentation.

    The teacher sees the first view, the weak one; the network sees all others.

    Loss: ``-sum_i p_i log q_i`` with ``p = softmax(t.Q/tau_t)`` and ``q = softmax(s.Q/tau_s)`` of
    the teacher's features t of the weak view, the network's features s of a strong view, and the
    queue Q (eq. 7).

    Published: ImageNet linear top-1 of ResNet-50 69.9 after 200 epochs with one strong view, 74.7
    with five (authors' README).

    Use it with small batches, if other images are often of the same class.

    Differs from the authors' code:

    * BatchNorm is shuffled as in ``moco``.
    """

    paper = (
        "Zheng et al., ReSSL: Relational Self-Supervised Learning with Weak Augmentation, "
        "NeurIPS 2021"
    )
    views = (2, None)

    @dataclass(frozen=True, kw_only=True)
    class Config(MomentumContrast.Config, EMATeacher.Config):
        momentum: Schedule = teacher_momentum(0.999)
        """Momentum of the teacher."""
        out_dim: int = setting(512, min=1, tiny=16)
        """Width of the head's output, D."""
        hidden_dim: int | None = setting(4096, min=1, tiny=32)
        """Width of the head's hidden layer; null: the width of the backbone."""
        queue_size: int = setting(131_072, min=1, tiny=lambda batch: 2 * batch)
        """Length of the queue, in keys; K."""
        temperature: float = setting(0.1, above=0)
        """Temperature of the network's similarities, tau_s."""
        teacher_temperature: float = setting(0.04, above=0)
        """Temperature of the teacher's similarities, tau_t: lower than ``temperature``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.queue = FeatureQueue(config.queue_size, config.out_dim)

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Pass the strong views to the network."""
        batch.input = batch.all_views[1:]

    def on_forward(self, task: Task) -> None:
        """Compute ``batch["keys"]`` (B, D) of the weak view, which are enqueued after the step."""
        batch = task.last_batch
        (batch["keys"],) = self.unit_keys(batch.all_views[:1])  # (B, D)
        if task.train:
            self.pending.append((batch["keys"],))

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss of eq. 7 for ``output`` (V, B, D), averaged over strong views."""
        return relation_cross_entropy(
            output,
            batch["keys"],
            self.queue.rows,
            temperature=self.config.temperature,
            target_temperature=self.config.teacher_temperature,
        )

    @property
    def chance_loss(self) -> float:
        """Loss of equal similarities: ln(``queue_size``)."""
        return math.log(self.config.queue_size)
