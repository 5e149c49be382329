"""Distillation of logits: a student learns the class scores of a frozen teacher.

V: views; B: images per rank; C: classes of the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema import FrozenModule
from selftask.errors import UserError
from selftask.methods.base import Task
from selftask.methods.families.distillation import Distillation, trained_teacher
from selftask.models.losses.distillation import label_cross_entropy, softened_distance
from selftask.models.precision import to_float32
from selftask.models.weights.trained import TrainedNetwork
from selftask.registry import register_method


@register_method("distill_logits")
class DistillLogits(Distillation):
    """Distillation of logits (arXiv:1503.02531): a student learns a teacher's class scores.

    Loss: ``tau^2 KL(softmax(t/tau) || softmax(s/tau))`` of the class scores s of the student and t
    of the teacher; ``loss`` selects other distances.

    Use it if the teacher is a classifier of the classes that you need.
    """

    paper = "Hinton et al., Distilling the Knowledge in a Neural Network, 2015"
    columns = {
        "distillation": "Term of the loss: distance from the teacher.",
        "labels": "Term of the loss: cross-entropy with labels.",
    }

    @dataclass(frozen=True, kw_only=True)
    class Config(Distillation.Config):
        teacher: FrozenModule = trained_teacher("give a run of supervised or timm:NAME")
        """Classifier whose scores are learned: a run of ``supervised``, ``RUN@best``, ``RUN@STEP``,
        a checkpoint, or ``timm:NAME`` with the model's own classifier.
        """
        loss: Literal["kl", "cross_entropy", "mse"] = "kl"
        """Distance from the teacher. kl: KL divergence of the softmaxes at ``temperature``;
        cross_entropy: cross-entropy of these softmaxes; mse: mean squared error of the scores.
        """
        temperature: float = setting(4.0, above=0)
        """Temperature of student and teacher, for ``kl`` and ``cross_entropy``."""
        label_weight: float = setting(0.0, min=0, max=1)
        """Weight of the cross-entropy with labels; the teacher's scores get 1 - label_weight."""

    def open_teacher(self, task: Task) -> TrainedNetwork:
        trained = super().open_teacher(task)
        if self.config.label_weight:
            _check_labels(task.data_module.train_source, trained.width)
        return trained

    def build_head(self, embed_dim: int) -> nn.Module:
        return nn.Linear(embed_dim, self.out_dim)

    def forward(self, output: Tensor, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Return the distance of the scores (V, B, C) from the teacher's, a mean over images.

        With ``label_weight`` w, the distance is weighted by 1 - w, and the cross-entropy with
        labels by w. That cross-entropy is a sum over labeled images divided by the number of all
        images.
        """
        distance, weight = self.distance(output, batch["targets"]), self.config.label_weight
        if not weight:
            return distance
        labels = label_cross_entropy(output, batch.labels)
        return {"distillation": (1 - weight) * distance, "labels": weight * labels}

    def distance(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the distance of the student's scores (V, B, C) from ``targets``, the teacher's."""
        loss, temperature = self.config.loss, self.config.temperature
        if loss == "mse":
            return F.mse_loss(to_float32(output), targets)
        return softened_distance(output, targets, temperature, kl=loss == "kl")


def _check_labels(source: Any, num_classes: int) -> None:
    """Raise UserError unless some images have labels, all of which are classes of the teacher."""
    if source is None:  # a ``Learner``, whose labels come with the batches
        return
    labels = source.labels
    high = -1 if labels is None else int(labels.max(initial=-1))
    if high < 0:
        raise UserError(
            "method.label_weight: needs labels, and these images have none; put those of each "
            "class into a folder of its own, or set label_weight=0"
        )
    if high >= num_classes:
        raise UserError(
            f"data: its labels go up to {high}, and the teacher has {num_classes} classes; set "
            "method.label_weight=0 to learn from its logits alone"
        )
