"""Methods whose student learns what a frozen teacher computes for the same views.

V: views; B: images per rank; D: width of the teacher's output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from selftask.config.fields import setting
from selftask.config.schema import FrozenModule
from selftask.methods.base import Method
from selftask.models.build import embed_dim
from selftask.models.network import Network
from selftask.models.precision import to_float32
from selftask.models.weights.frozen import Frozen
from selftask.models.weights.trained import TrainedNetwork

if TYPE_CHECKING:
    from selftask.task import Task


def trained_teacher(missing: str) -> Any:
    """Return a required config field for the teacher, with a hint for users who omit it."""
    return setting(missing=missing, tiny=FrozenModule(model="timm:test_vit", weights="none"))


class Distillation(Method):
    """Method with ``self.teacher``, a trained network, and a student with as many outputs."""

    loss_reduction = "samples"
    views = (1, None)
    learns_scores: ClassVar[bool] = True
    """Whether the teacher must have a head that scores classes or prototypes."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        teacher: FrozenModule

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            yield from FrozenModule.of(self.teacher).problems("teacher")

    def open_teacher(self, task: Task) -> TrainedNetwork:
        """Return the teacher, and set ``out_dim`` to the width of its output, D.

        Raises:
            UserError: If the teacher does not exist or does not match.
        """
        trained = self.open_trained("teacher", task, scores=self.learns_scores)
        self.out_dim = trained.width
        return trained

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Open the teacher, and build the student on top of the backbone."""
        self.teacher = Frozen(self.open_teacher(task).network)
        return Network(backbone, self.build_head(embed_dim(backbone)))

    def on_forward(self, task: Task) -> None:
        """Compute the teacher's output ``batch["targets"]`` (V, B, D)."""
        batch = task.last_batch
        batch["targets"] = to_float32(self.teacher(batch.all_views))
