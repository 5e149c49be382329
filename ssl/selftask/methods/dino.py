"""DINO: match the teacher's output for global views from any view of the image.

Caron et al., Emerging Properties in Self-Supervised Vision Transformers, ICCV 2021,
arXiv:2104.14294. Equation numbers refer to it.

V: views, the first two of which are global; B: images per rank; K: outputs of the head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.run_length import RunLength
from selftask.config.schema.optimizer import GroupRule
from selftask.distributed.collectives import all_reduce_mean
from selftask.methods.base import Method
from selftask.models.clustering import swapped_cross_entropy
from selftask.models.heads import DINOHead
from selftask.models.precision import to_float32
from selftask.models.teacher import Teacher
from selftask.models.weights.load import load_part
from selftask.models.weights.trained import Scores
from selftask.optim.schedules import build_schedule, last_value
from selftask.registry import register_method

if TYPE_CHECKING:
    from selftask.task import Task

NUM_GLOBAL = 2  # views that the teacher sees


@register_method("dino")
class DINO(Method):
    """DINO (arXiv:2104.14294): self-distillation with multi-crop."""

    columns = {
        "kl": "Term of the loss: divergence of the student from its targets.",
        "teacher_entropy": (
            "Term of the loss: entropy of the teacher's targets. 0 is collapse to one "
            "prototype, the loss at chance is collapse to equal probabilities."
        ),
    }
    loss_reduction = "samples"
    views = (2, None)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(65_536, min=1, tiny=16)
        """Number of prototypes, K."""
        hidden_dim: int = setting(2048, min=1, tiny=32)
        """Width of the head's hidden layers."""
        bottleneck: int = setting(256, min=1, tiny=16)
        """Width before the last layer."""
        num_layers: int = setting(3, min=1, max=100)
        """Number of layers of the head including the bottleneck, without the last layer."""
        norm: bool = False
        """Whether the head has BatchNorm, for convolutional backbones."""
        temperature: float = setting(0.1, above=0)
        """Temperature of the student, tau_s in eq. 1."""
        teacher_temperature: float | dict[str, Any] = setting(
            {"name": "constant", "start": 0.07, "warmup": "30 epochs", "warmup_start": 0.04},
            of="schedules",
            above=0,
        )
        """Temperature of the teacher, tau_t; 0.04 throughout is safer if it diverges."""
        center_momentum: float = setting(0.9, min=0, max=1)
        """Momentum of the center, m in eq. 4."""
        momentum: float | dict[str, Any] = setting(
            {"name": "cosine", "start": 0.996, "end": 1.0}, of="schedules", min=0, max=1
        )
        """Momentum of the teacher, lambda; larger at the start for smaller batches."""
        freeze_last_layer: int | str = setting("1 epoch", duration=True)
        """Duration for which the last layer is not trained."""

    center: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.register_buffer("center", torch.zeros(config.out_dim))  # (K,), c in eq. 4
        self.pending: list[Tensor] = []  # mean scores (K,) per batch since the last step

    def build_head(self, embed_dim: int) -> nn.Module:
        config = self.config
        return DINOHead(
            embed_dim,
            config.out_dim,
            hidden=config.hidden_dim,
            bottleneck=config.bottleneck,
            num_layers=config.num_layers,
            norm=config.norm,
        )

    def setup(self, task: Task) -> None:
        config, length = self.config, task.length
        self.teacher = Teacher(task.base_model, drop_path=False)
        self.momentum_at = build_schedule(config.momentum, length)
        self.teacher_temperature_at = build_schedule(config.teacher_temperature, length)

    def group_rules(self) -> list[GroupRule]:
        """Freeze the last layer at first, while the teacher is random."""
        return [GroupRule(match="network.head.last_layer", freeze=self.config.freeze_last_layer)]

    def on_forward(self, task: Task) -> None:
        """Compute the teacher's targets for global views: centred (eq. 4), then sharpened."""
        batch = task.last_batch
        scores = to_float32(self.teacher(batch.all_views[:NUM_GLOBAL]))  # (2, B, K)
        temperature = self.teacher_temperature_at(task.where)
        batch["probs"] = F.softmax((scores - self.center) / temperature, dim=2)  # (2, B, K)
        if task.train:
            self.pending.append(scores.mean(dim=(0, 1)))  # (K,)

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return eq. 3, averaged over its pairs; ``output`` (V, B, K).

        The cross-entropy is split into the teacher's entropy, which has no gradient, and the rest.
        """
        log_probs = F.log_softmax(to_float32(output) / self.config.temperature, dim=2)
        cross_entropy = swapped_cross_entropy(batch["probs"], log_probs)
        entropy = torch.special.entr(batch["probs"]).sum(dim=2).mean()
        return {"teacher_entropy": entropy, "kl": cross_entropy - entropy}

    @torch.no_grad()
    def on_update(self, task: Task) -> None:
        """Update the teacher and the centre (eq. 4)."""
        self.teacher.update(task.base_model, momentum=self.momentum_at(task.where))
        center = all_reduce_mean(torch.stack(self.pending).mean(dim=0))  # (K,)
        self.center.lerp_(center, 1.0 - self.config.center_momentum)
        self.pending.clear()

    @property
    def chance_loss(self) -> float:
        """Loss if the student gives every prototype the same probability."""
        return math.log(self.config.out_dim)

    def export_backbone(self, network: nn.Module) -> nn.Module:
        """Return the teacher's backbone, which is better throughout training (section 5.2)."""
        return super().export_backbone(self.teacher.network)

    def load_scores(self, embed_dim: int, checkpoint: Mapping[str, Any]) -> Scores:
        """Return the teacher's head, with its last temperature and its centre."""
        head = self.build_head(embed_dim)
        load_part(head, checkpoint, "method.teacher.network.head")
        length = RunLength(**checkpoint["length"])
        temperature = last_value(self.config.teacher_temperature, length)
        return Scores(head, temperature, "centering", checkpoint["method"]["center"])
