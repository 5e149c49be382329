"""CompRess: a student learns a frozen teacher's similarities between images.

B: images per rank; E: features of the student; D: features of the teacher; K: length of a queue.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.base import Task
from selftask.methods.families.distillation import QueueDistillation
from selftask.models.build import embed_dim
from selftask.models.feature_queue import FeatureQueue
from selftask.models.losses.distillation import softened_distance
from selftask.models.precision import in_full_precision, to_float32
from selftask.registry import register_method


@register_method("compress")
class CompRess(QueueDistillation):
    """CompRess (arXiv:2010.14713): a student learns a teacher's similarities to a memory of images.

    Loss: ``KL(softmax(t.Q/tau) || softmax(s.Q/tau))`` of the features t of the teacher and s of the
    student, over queues Q (eq. 2).

    Published: ImageNet linear top-1 of ResNet-50 71.6 from SimCLR's ResNet-50 x4, of ResNet-18 61.7
    from MoCo v2 (authors' README).

    Use it to give a small network the neighborhoods of a large frozen one.

    Differs from the authors' code:

    * With one queue, one linear layer maps the student's features to the teacher's width.
    * The student's queue contains the student's own features; in the authors' code, by default,
      those of its moving average with a momentum of 0.999.
    """

    paper = (
        "Koohpayegani et al., CompRess: Self-Supervised Learning by Compressing Representations, "
        "NeurIPS 2020"
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(QueueDistillation.Config):
        queue_size: int = setting(128_000, min=1, tiny=lambda batch: 2 * batch)
        """Length of a queue, in images; K."""
        temperature: float = setting(0.04, above=0)
        """Temperature of the similarities of both networks."""
        student_queue: bool = True
        """Whether the student's features are compared with a queue of its own features (CompRess-2q
        of the paper); false: with the teacher's queue (CompRess-1q).
        """

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        self.student_dim = embed_dim(backbone)
        return super().build_network(backbone, task)

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build a linear layer to the teacher's width if both share a queue, else the identity."""
        return nn.Identity() if self.config.student_queue else nn.Linear(embed_dim, self.out_dim)

    def setup(self, task: Task) -> None:
        super().setup(task)
        if self.config.student_queue:
            self.student_queue = FeatureQueue(self.config.queue_size, self.student_dim)

    def queues(self) -> tuple[FeatureQueue, ...]:
        return (self.queue, self.student_queue) if self.config.student_queue else (self.queue,)

    def rows(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the teacher's unit vectors, (B, D), which are enqueued after the step.

        With ``student_queue``, the student's are also returned, (B, E).
        """
        student = F.normalize(to_float32(batch.output[0].detach()), dim=1)
        return (batch["targets"], student)[: len(self.queues())]

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss of eq. 2 for ``output`` (1, B, E), or (1, B, D) with one queue."""
        queues = self.queues()
        return compress_loss(
            output[0],
            batch["targets"],
            queues[-1].rows,
            queues[0].rows,
            temperature=self.config.temperature,
        )


@in_full_precision
def compress_loss(
    student: Tensor,
    teacher: Tensor,
    student_queue: Tensor,
    teacher_queue: Tensor,
    *,
    temperature: float,
) -> Tensor:
    """Return KL(teacher || student) of the similarities to the images of the queues (eq. 2).

    It is a mean over images. With a common queue, E is D.

    Args:
        student: (B, E), not necessarily normalized.
        teacher: (B, D) unit vectors.
        student_queue: (K, E) unit vectors.
        teacher_queue: (K, D) unit vectors of the same images.
        temperature: Temperature of both softmaxes.
    """
    ours = F.normalize(student, dim=1) @ student_queue.to(student.dtype).T  # (B, K)
    theirs = teacher @ teacher_queue.to(teacher.dtype).T
    return softened_distance(ours, theirs, temperature, kl=True) / temperature**2
