"""dBOT: predict a frozen teacher's features of masked patches, in several stages.

B: images per rank, N: patches of an image, K encoded and M masked ones, D: width of the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema import FrozenModule
from selftask.methods.base import Task
from selftask.methods.families.distillation import trained_teacher
from selftask.methods.families.masked_patches import KeptPatches
from selftask.models.distillation.patch_targets import PatchTeacher
from selftask.models.features.tokens import gather_tokens
from selftask.models.network import PatchOutput
from selftask.models.precision import to_float32
from selftask.registry import register_method


@register_method("dbot")
class DBOT(KeptPatches):
    """dBOT (arXiv:2209.03917): MAE that predicts the features of a teacher, which may be random.

    The teacher of the first stage has random weights; the run of one stage is the teacher of the
    next: ``method.teacher=RUN``.

    Loss: ``smooth_l1(p, LN(t))`` of masked patches, with predictions p and the teacher's features
    t, normalized over features (LN).

    Use it in place of ``mae`` if features, not pixels, are to be predicted and no trained teacher
    exists.

    Differs from the authors' code:

    * The teacher's features are also normalized by its last norm; in the authors' code they come
      from its last block.
    * The first teacher has random weights of its own; in the authors' code, the student's initial
      weights.
    * The decoder has no stochastic depth; in the authors' code it has the rate of the backbone.
    """

    paper = "Liu et al., Exploring Target Representations for Masked Autoencoders, ICLR 2024"

    @dataclass(frozen=True, kw_only=True)
    class Config(KeptPatches.Config):
        teacher: FrozenModule = trained_teacher()
        """Backbone whose features of patches are predicted; ``weights: none`` in stage 1."""
        beta: float = setting(2.0, above=0)
        """Error below which the loss is quadratic."""

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Open the teacher, and build a network whose decoder has the teacher's width.

        Raises:
            UserError: If the teacher does not exist or has no patches, or as ``build_kept``.
        """
        trained = self.open_trained("teacher", task)
        self.teacher = PatchTeacher(trained.network.backbone, "method.teacher")
        return self.build_kept(backbone, task, trained.width)

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Compute ``batch["targets"]`` (B, M, D), normalized features of the masked patches."""
        batch = task.last_batch
        images = batch.all_views[0]
        _, patches = self.teacher.on_grid(images, self.grid_of(*images.shape[2:]))  # (B, N, D)
        masked = gather_tokens(patches, batch["mask"].predict[:, 0])
        batch["targets"] = F.layer_norm(masked, masked.shape[-1:])

    def forward(self, output: PatchOutput, batch: Batch) -> Tensor:
        """Return the mean smooth L1 distance of predictions (B, 1, M, D) and targets."""
        prediction, targets = to_float32(output.prediction[:, 0]), to_float32(batch["targets"])
        return F.smooth_l1_loss(prediction, targets, beta=self.config.beta)
