"""DINO: predict the teacher's output for global views from any other view of the image.

Equation numbers refer to the paper.

V: views, the first two of which are global; B: images per rank; K: outputs of the head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.distributed.collectives import all_reduce_mean
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import EMATeacher
from selftask.methods.families.prototypes import PrototypeHeads, target_entropy
from selftask.models.clustering import swapped_cross_entropy
from selftask.models.precision import to_float32
from selftask.models.weights.trained import Scores
from selftask.registry import register_method

NUM_GLOBAL = 2  # views that the teacher sees


@register_method("dino")
class DINO(PrototypeHeads, EMATeacher):
    """DINO (arXiv:2104.14294): predicts an EMA teacher's outputs for global crops from any crop.

    Loss: ``-sum_k t_k log softmax(s/tau)_k`` of the student's output s for a crop and the teacher's
    centered and sharpened output t for a global crop, over pairs of different crops (eq. 3).

    Published: ImageNet k-NN and linear top-1 of ViT-S/16 74.5 and 77.0, ViT-B/16 76.1 and 78.2,
    ResNet-50 67.5 and 75.3 (authors' README).

    Use it for transformers whose frozen features are used, by k-NN or a linear layer.

    Differs from the authors' code:

    * Positions of the 96-pixel crops are interpolated with antialiasing and differ from the
      published ones by up to 1.7e-2. timm interpolates in the same way, so an exported backbone
      gives the same features in timm.
    * If the teacher temperature is warmed up (not in the ImageNet recipe), it rises with each step;
      in the authors' code, with each epoch.
    """

    paper = "Caron et al., Emerging Properties in Self-Supervised Vision Transformers, ICCV 2021"
    columns = {"kl": "Term of the loss: divergence of the student from its targets."}
    loss_reduction = "samples"
    views = (2, None)
    exports_teacher = True  # better throughout training (section 5.2)
    teacher_drop_path = False

    @dataclass(frozen=True, kw_only=True)
    class Config(PrototypeHeads.Config, EMATeacher.Config):
        norm: bool = False
        """Whether the head has BatchNorm, for convolutional backbones."""

    center: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.register_buffer("center", torch.zeros(config.out_dim))  # (K,), c in eq. 4

    def build_head(self, embed_dim: int) -> nn.Module:
        return self.prototype_head(embed_dim, norm=self.config.norm)

    def on_forward(self, task: Task) -> None:
        """Compute ``batch["probs"]`` (2, B, K), the teacher's targets for global views.

        They are centered (eq. 4), then sharpened.
        """
        batch = task.last_batch
        scores = to_float32(self.teacher(batch.all_views[:NUM_GLOBAL]))  # (2, B, K)
        temperature = self.teacher_temperature_at(task.where)
        batch["probs"] = F.softmax((scores - self.center) / temperature, dim=2)  # (2, B, K)
        if task.train:
            self.pending.append((scores.mean(dim=(0, 1)),))  # (K,) for each center

    def centers(self) -> tuple[Tensor, ...]:
        """Return the centers (K,), in the order of the means in an item of ``pending``."""
        return (self.center,)

    def forward(self, output: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the loss of eq. 3 for ``output`` (V, B, K), averaged over pairs of views.

        The cross-entropy is split into the teacher's entropy, which has no gradient, and the KL
        divergence.
        """
        cross_entropy = swapped_cross_entropy(batch["probs"], self.log_probs(output))
        entropy = target_entropy(batch["probs"])
        return {"target_entropy": entropy, "kl": cross_entropy - entropy}

    @torch.no_grad()
    def on_update(self, task: Task) -> None:
        """Update the teacher and the centers (eq. 4)."""
        super().on_update(task)
        of_batches = zip(*self.take_pending(), strict=True)
        for center, means in zip(self.centers(), of_batches, strict=True):
            mean = all_reduce_mean(torch.stack(means).mean(dim=0))  # (K,)
            center.lerp_(mean.to(center.dtype), 1.0 - self.config.center_momentum)

    @property
    def chance_loss(self) -> float:
        """Loss of equal probabilities: ln(``out_dim``)."""
        return math.log(self.config.out_dim)

    def load_scores(self, embed_dim: int, checkpoint: Mapping[str, Any]) -> Scores:
        """Return the teacher's head, with its last temperature and its center."""
        return self.teacher_scores(embed_dim, checkpoint, checkpoint["method"]["center"])
