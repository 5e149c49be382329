"""Distillation of features: a student learns the features of a frozen teacher for the same views.

V: views; B: images per rank; E: features of the student; D: features of the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.schema import FrozenModule
from selftask.errors import UserError
from selftask.methods.families.distillation import Distillation, trained_teacher
from selftask.models.losses.distillation import cosine_distance
from selftask.models.precision import to_float32
from selftask.registry import register_method


@register_method("distill_features")
class DistillFeatures(Distillation):
    """Distillation of features: a student learns the pooled features of a frozen teacher.

    Loss: ``distance(W s, t)`` of the pooled features s of the student and t of the teacher, with a
    layer W (``project``); ``loss`` selects the distance.

    Use it to train a small network to reproduce a large one's features, if the large one has no
    head.
    """

    learns_scores = False

    @dataclass(frozen=True, kw_only=True)
    class Config(Distillation.Config):
        teacher: FrozenModule = trained_teacher()
        """Backbone whose features are learned."""
        loss: Literal["cosine", "mse"] = "cosine"
        """Distance between the features of student and teacher. cosine: 1 - cosine; mse: mean
        squared error.
        """
        project: Literal["auto", "linear", "none"] = "auto"
        """Layer from the student's features to the teacher's. linear: one linear layer; none: no
        layer, for equal widths; auto: linear if widths differ.
        """

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build the layer from the student's features to the teacher's: (N, E) -> (N, D).

        Raises:
            UserError: If the widths differ with ``project=none``.
        """
        project, equal = self.config.project, embed_dim == self.out_dim
        if project == "linear" or (project == "auto" and not equal):
            return nn.Linear(embed_dim, self.out_dim)
        if not equal:
            raise UserError(
                f"method.project=none: the student has {embed_dim} features and the teacher "
                f"{self.out_dim}; project=linear maps one to the other"
            )
        return nn.Identity()

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the distance of the features (V, B, D) from the teacher's, a mean over images.

        For ``mse`` it is a mean over features, too.
        """
        if self.config.loss == "cosine":
            return cosine_distance(output, batch["targets"])
        return F.mse_loss(to_float32(output), batch["targets"])
