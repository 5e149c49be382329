"""Methods with a teacher that is an exponential moving average of the trained network.

V: views, B: images per rank, D: width of the projector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from torch import nn

from selftask.config.fields import setting
from selftask.methods.base import Method, Task
from selftask.models.network import Network
from selftask.models.teacher import Teacher
from selftask.optim.schedules import build_schedule

Schedule: TypeAlias = float | dict[str, Any]


def teacher_momentum(default: Schedule) -> Any:
    """Return the config field ``momentum`` of a method, with the given default."""
    return setting(default, of="schedules", min=0, max=1)


class EMATeacher(Method):
    """Method with ``self.teacher``, a moving average of the network, updated after each step.

    ``on_forward`` of the method adds the teacher's output to the batch:
    ``task.last_batch["teacher"] = self.teacher(task.last_batch.input)``.
    """

    exports_teacher: ClassVar[bool] = False
    """Whether evaluations and export use the teacher's backbone instead of the network's."""
    teacher_drop_path: ClassVar[bool] = True
    """Whether the teacher has dropout and stochastic depth like the network."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        momentum: Schedule = teacher_momentum({"name": "cosine", "start": 0.996, "end": 1.0})
        """Momentum of the teacher, the weight of its old parameters at each step; smaller for short
        runs, larger for small batches.
        """

    def averaged(self, network: Any) -> nn.Module:
        """Return the part of the network that the teacher averages: all of it by default."""
        return network

    def setup(self, task: Task) -> None:
        super().setup(task)
        part = self.averaged(task.base_model)
        self.teacher = Teacher(part, drop_path=self.teacher_drop_path)
        self.momentum_at = build_schedule(self.config.momentum, task.length)

    def on_update(self, task: Task) -> None:
        """Update the teacher after the optimizer step of the network."""
        super().on_update(task)
        momentum = self.momentum_at(task.where)
        self.teacher.update(self.averaged(task.base_model), momentum=momentum)

    def export_backbone(self, network: nn.Module) -> nn.Module:
        return super().export_backbone(self.teacher.network if self.exports_teacher else network)


class ProjectorTeacher(EMATeacher):
    """Method whose head has a ``projector`` and predictors, and whose teacher has no predictor.

    The teacher returns projections (V, B, D). With a ``ProjectorPredictor`` as head, the network
    returns projections and predictions, stacked as (V, B, 2, D).
    """

    per_view = True

    def averaged(self, network: Any) -> nn.Module:
        """Return backbone and projector; the teacher has no predictor."""
        return Network(network.backbone, network.head.projector, per_view=self.per_view)
