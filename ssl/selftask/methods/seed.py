"""SEED: a student learns a frozen teacher's similarities to a queue of the teacher's features.

B: images per rank; E: features of the student; D: features of the teacher; K: length of the queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.families.distillation import QueueDistillation
from selftask.models.heads import mlp
from selftask.models.losses.distillation import soft_cross_entropy
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("seed")
class SEED(QueueDistillation):
    """SEED (arXiv:2101.04731): a student learns a teacher's similarities to older images.

    Loss: ``-sum_i p_i log q_i`` of softmaxes p and q of the teacher's and the student's
    similarities to the teacher's features of the same image and of the images in the queue (eq. 4).

    Published: ImageNet linear top-1 from 42.2 to 67.6 for EfficientNet-B0, from 36.3 to 68.2 for
    MobileNetV3-L (authors' README).

    Use it to distill a large self-supervised network into a small one.

    Differs from the authors' code:

    * The teacher's features are those of its backbone; in the authors' code, of its projection
      head.
    * The teacher's temperature is 0.01, as in the paper; in the authors' code 1e-4 by default.
    """

    paper = "Fang et al., SEED: Self-supervised Distillation For Visual Representation, ICLR 2021"

    @dataclass(frozen=True, kw_only=True)
    class Config(QueueDistillation.Config):
        hidden_dim: int | None = setting(None, min=1, tiny=32)
        """Width of the hidden layer of the student's head; null: the width of its backbone."""
        temperature: float = setting(0.2, above=0)
        """Temperature of the student's similarities."""
        teacher_temperature: float = setting(0.01, above=0)
        """Temperature of the teacher's similarities."""

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build two layers from the student's features to the teacher's: (N, E) -> (N, D)."""
        return mlp(embed_dim, self.config.hidden_dim or embed_dim, self.out_dim, norm=False)

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss of eq. 4 for ``output`` (1, B, D), averaged over images."""
        return seed_loss(
            output[0],
            batch["targets"],
            self.queue.rows,
            temperature=self.config.temperature,
            teacher_temperature=self.config.teacher_temperature,
        )

    @property
    def chance_loss(self) -> float:
        """Loss of equal similarities: ln(1 + ``queue_size``)."""
        return math.log(1 + self.config.queue_size)


@in_full_precision
def seed_loss(
    student: Tensor,
    teacher: Tensor,
    queue: Tensor,
    *,
    temperature: float,
    teacher_temperature: float,
) -> Tensor:
    """Return the cross-entropy of the student's similarities with the teacher's as targets.

    Candidates are the teacher's features of the image itself and those in the queue (eq. 4).

    Args:
        student: (B, D), not necessarily normalized.
        teacher: (B, D) unit vectors.
        queue: (K, D) unit vectors of the teacher.
        temperature: Temperature of the student.
        teacher_temperature: Temperature of the teacher.
    """
    similarities = []
    for features in (F.normalize(student, dim=1), teacher):
        own = (features * teacher).sum(dim=1, keepdim=True)  # (B, 1)
        similarities.append(torch.cat([own, features @ queue.to(features.dtype).T], dim=1))
    ours, theirs = similarities  # (B, 1 + K) each
    probs = F.softmax(theirs / teacher_temperature, dim=1)
    return soft_cross_entropy(ours / temperature, probs)
