"""MSF (mean shift): regress a teacher's neighbors among older images.

B: images per rank, D: width of projector and predictor, K: length of the queue, N: neighbors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import ProjectorTeacher, Schedule, teacher_momentum
from selftask.models.feature_queue import FeatureQueue
from selftask.models.heads import ProjectorPredictor, mlp
from selftask.models.precision import in_full_precision, to_float32
from selftask.registry import register_method


@register_method("msf")
class MSF(ProjectorTeacher):
    """MSF (arXiv:2105.07269): BYOL whose targets are the neighbors of the teacher's output.

    The teacher sees the first view, which may be weakly augmented, and the network the second.

    Loss: ``mean_n (2 - 2 cos(p, n))`` of the prediction p, over the nearest neighbors n of the
    teacher's output (eq. 1).

    Published: ImageNet linear top-1 of ResNet-50 72.4 after 200 epochs (authors' README).

    Use it in place of ``byol`` if classes are broad, with memory for a queue.

    Differs from the authors' code:

    * BatchNorm of the teacher is not shuffled; in the authors' code its images are exchanged
      between GPUs.
    """

    paper = "Koohpayegani et al., Mean Shift for Self-Supervised Learning, ICCV 2021"
    loss_reduction = "samples"  # neighbors are constants
    views = 2
    min_batch_size = 2  # BatchNorm in the head

    @dataclass(frozen=True, kw_only=True)
    class Config(ProjectorTeacher.Config):
        momentum: Schedule = teacher_momentum(0.99)
        """Momentum of the teacher."""
        out_dim: int = setting(512, min=1, tiny=16)
        """Width of the output of projector and predictor, D."""
        hidden_dim: int = setting(4096, min=1, tiny=32)
        """Width of the hidden layers of projector and predictor."""
        queue_size: int = setting(1_024_000, min=1, tiny=lambda batch: 2 * batch)
        """Number of images among which neighbors are searched, K."""
        num_neighbors: int = setting(5, min=1)
        """Number of neighbors, of which the first is the image itself; 1 is BYOL in one direction.
        """

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if self.num_neighbors > self.queue_size:
                yield (
                    f"num_neighbors: {self.num_neighbors} is more than the queue_size of "
                    f"{self.queue_size}"
                )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.queue = FeatureQueue(config.queue_size, config.out_dim)

    def build_head(self, embed_dim: int) -> nn.Module:
        dim, hidden_dim = self.config.out_dim, self.config.hidden_dim
        return ProjectorPredictor(mlp(embed_dim, hidden_dim, dim), mlp(dim, hidden_dim, dim))

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Pass the second view to the network."""
        batch.input = batch.all_views[1:]

    def on_forward(self, task: Task) -> None:
        """Find ``batch["neighbors"]`` (B, N, D) of the teacher's outputs in queue and batch.

        The outputs are enqueued after the step.
        """
        batch = task.last_batch
        (targets,) = self.teacher(batch.all_views[:1])
        targets = F.normalize(to_float32(targets), dim=1)  # (B, D)
        count = self.config.num_neighbors
        batch["neighbors"] = self.queue.nearest_few(targets, count, after=targets)  # (B, N, D)
        if task.train:
            self.pending.append(targets)

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss of eq. 1 for ``output`` (1, B, 2, D)."""
        return mean_shift_loss(output[0, :, 1], batch["neighbors"])

    def on_update(self, task: Task) -> None:
        super().on_update(task)
        for targets in self.take_pending():
            self.queue.update(targets)


@in_full_precision
def mean_shift_loss(prediction: Tensor, neighbors: Tensor) -> Tensor:
    """Return 2 - 2 cos of predictions and neighbors, averaged.

    Args:
        prediction: (B, D), not necessarily normalized.
        neighbors: (B, N, D), unit vectors.

    Returns:
        A scalar from 0 to 4.
    """
    units = F.normalize(prediction, dim=1)
    return 2 - 2 * (neighbors @ units[:, :, None]).mean()
