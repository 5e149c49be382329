"""Distillation of logits: a student learns the class scores of a frozen teacher.

V: views; B: images per rank; C: classes of the teacher.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema import FrozenModule
from selftask.errors import UserError
from selftask.methods.base import Method
from selftask.models.build import embed_dim
from selftask.models.losses.distillation import label_cross_entropy, softened_distance
from selftask.models.network import Network
from selftask.models.precision import to_float32
from selftask.models.weights.frozen import Frozen
from selftask.registry import register_method

if TYPE_CHECKING:
    from selftask.task import Task


@register_method("distill_logits")
class DistillLogits(Method):
    """Distillation of logits (arXiv:1503.02531): a student learns a frozen teacher's scores."""

    columns = {
        "distillation": "Term of the loss: distance from the teacher.",
        "labels": "Term of the loss: cross-entropy with labels.",
    }
    loss_reduction = "samples"
    views = (1, None)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        teacher: FrozenModule = setting(
            missing="give a run of supervised or timm:NAME",
            tiny=FrozenModule(model="timm:test_vit", weights="none"),
        )
        """Classifier whose scores are learned: a run of ``supervised``, ``RUN@best``, ``RUN@STEP``,
        a checkpoint, or ``timm:NAME`` with the model's own classifier.
        """
        loss: Literal["kl", "cross_entropy", "mse"] = "kl"
        """Distance of the scores: of their softmax at ``temperature``, or ``mse`` of the scores."""
        temperature: float = setting(4.0, above=0)
        """Temperature of student and teacher, for ``kl`` and ``cross_entropy``."""
        label_weight: float = setting(0.0, min=0, max=1)
        """Weight of the cross-entropy with labels; the teacher's scores get 1 - label_weight."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            yield from FrozenModule.of(self.teacher).problems("teacher")

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Read the teacher and build a student with as many outputs.

        Raises UserError if the teacher does not exist or does not match.
        """
        trained = self.open_trained("teacher", task, scores=True)
        if self.config.label_weight:
            _check_labels(task.data_module.train_source, trained.width)
        self.teacher = Frozen(trained.network)
        return Network(backbone, nn.Linear(embed_dim(backbone), trained.width))

    def on_forward(self, task: Task) -> None:
        """Compute the teacher's scores ``batch["targets"]`` (V, B, C)."""
        batch = task.last_batch
        batch["targets"] = to_float32(self.teacher(batch.all_views))

    def forward(self, output: Tensor, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Return the distance of the scores (V, B, C) from the teacher's, a mean over images.

        With ``label_weight`` w, the distance is weighted by 1 - w, and the cross-entropy with
        labels by w. That cross-entropy is a sum over labelled images divided by the number of all
        images.
        """
        distance, weight = self.distance(output, batch["targets"]), self.config.label_weight
        if not weight:
            return distance
        labels = label_cross_entropy(output, batch.labels)
        return {"distillation": (1 - weight) * distance, "labels": weight * labels}

    def distance(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the distance of the student's scores (V, B, C) from the teacher's."""
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
