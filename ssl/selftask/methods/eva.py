"""EVA: predict the features of a frozen teacher, such as CLIP, for hidden patches.

B: images per rank, N: patches of an image, H: maximum number of hidden ones, E: width of the
backbone, D: width of the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.schema import FrozenModule
from selftask.methods.base import Task
from selftask.methods.families.distillation import trained_teacher
from selftask.methods.families.masked_patches import BlockMaskedPatches, mean_of_hidden
from selftask.models.distillation.patch_targets import PatchTeacher
from selftask.models.features.tokens import gather_tokens
from selftask.models.network import PatchOutput
from selftask.models.precision import to_float32
from selftask.registry import register_method


@register_method("eva")
class EVA(BlockMaskedPatches):
    """EVA (arXiv:2211.07636): predicts a frozen teacher's features of hidden patches.

    Loss: ``-cos(p, t)`` of hidden patches, with predictions p and the teacher's features t.

    Published: ImageNet fine-tuned top-1 of EVA-g 89.7 (authors' README).

    Use it before fine-tuning a transformer, if a strong teacher such as CLIP exists.

    Differs from the authors' code:

    * The loss is a mean over the hidden patches of an image, then over images; in the authors'
      code, over the hidden patches of a batch.
    * Features of a teacher with another grid of patches are interpolated; in the authors' code
      grids are equal.
    """

    paper = (
        "Fang et al., EVA: Exploring the Limits of Masked Visual Representation Learning at Scale, "
        "CVPR 2023"
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(BlockMaskedPatches.Config):
        teacher: FrozenModule = trained_teacher()
        """Backbone whose features of patches are predicted, such as CLIP's vision tower."""

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Open the teacher, and build a network whose head has the teacher's width.

        Raises:
            UserError: If the teacher does not exist or has no patches, or if the backbone does not
                fit the masks.
        """
        trained = self.open_trained("teacher", task)
        self.teacher = PatchTeacher(trained.network.backbone, "method.teacher")
        self.out_dim = trained.width
        return super().build_network(backbone, task)

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build the linear layer from a patch to the teacher's features."""
        return nn.Linear(embed_dim, self.out_dim)

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Compute ``batch["targets"]`` (B, H, D), the teacher's features of hidden patches.

        The teacher gets the whole images.
        """
        batch = task.last_batch
        _, patches = self.teacher.on_grid(batch.all_views[0], batch["grid"])
        batch["targets"] = gather_tokens(patches, batch["hidden"][0])

    def forward(self, output: PatchOutput, batch: Batch) -> Tensor:
        """Return the mean of -cos(prediction, target) over hidden patches, both (B, H, D)."""
        prediction, targets = to_float32(output.prediction), to_float32(batch["targets"])
        cosines = F.cosine_similarity(prediction, targets, dim=2)
        return mean_of_hidden(-cosines, batch["hidden"][1])
