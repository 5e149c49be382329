"""Distillation of features: a student has the features of a frozen teacher for the same views.

V: views; B: images per rank; E: features of the student; D: features of the teacher.
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
from selftask.models.losses.distillation import cosine_distance
from selftask.models.network import Network
from selftask.models.precision import to_float32
from selftask.models.weights.frozen import Frozen
from selftask.registry import register_method

if TYPE_CHECKING:
    from selftask.task import Task


@register_method("distill_features")
class DistillFeatures(Method):
    """Distillation of features: a student learns the pooled features of a frozen teacher."""

    loss_reduction = "samples"
    views = (1, None)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        teacher: FrozenModule = setting(
            missing="give a run, an exported backbone.pt, timm:NAME or package.module:Class",
            tiny=FrozenModule(model="timm:test_vit", weights="none"),
        )
        """Backbone whose features are learned."""
        loss: Literal["cosine", "mse"] = "cosine"
        """Distance of the features."""
        project: Literal["auto", "linear", "none"] = "auto"
        """Layer from the student's features to the teacher's; auto: linear if widths differ."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            yield from FrozenModule.of(self.teacher).problems("teacher")

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Read the teacher and build a student with as many outputs.

        Raises UserError if the teacher does not exist or does not match.
        """
        trained = self.open_trained("teacher", task)
        self.teacher = Frozen(trained.network)
        self.out_dim = trained.width
        return Network(backbone, self.build_head(embed_dim(backbone)))

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build the layer from the student's features to the teacher's: (N, E) -> (N, D)."""
        project, equal = self.config.project, embed_dim == self.out_dim
        if project == "linear" or (project == "auto" and not equal):
            return nn.Linear(embed_dim, self.out_dim)
        if not equal:
            raise UserError(
                f"method.project=none: the student has {embed_dim} features and the teacher "
                f"{self.out_dim}; project=linear maps one to the other"
            )
        return nn.Identity()

    def on_forward(self, task: Task) -> None:
        """Compute the teacher's features ``batch["targets"]`` (V, B, D)."""
        batch = task.last_batch
        batch["targets"] = to_float32(self.teacher(batch.all_views))

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the distance of the features (V, B, D) from the teacher's, a mean over images."""
        if self.config.loss == "cosine":
            return cosine_distance(output, batch["targets"])
        return F.mse_loss(to_float32(output), batch["targets"])
