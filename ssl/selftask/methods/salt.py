"""SALT: predict a frozen teacher's features of several blocks of an image from another block.

B: images per rank, N: patches of an image, D: width of the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.config.schema import FrozenModule
from selftask.methods.base import Task
from selftask.methods.families.block_prediction import BlockPrediction
from selftask.methods.families.distillation import trained_teacher
from selftask.methods.families.masked_patches import Kept, MaskedPatches, build_kept_network
from selftask.models.distillation.patch_targets import PatchTeacher
from selftask.models.features.tokens import Grid
from selftask.registry import register_method


@register_method("salt")
class SALT(BlockPrediction, MaskedPatches):
    """SALT (arXiv:2509.24317): I-JEPA whose teacher is a trained, frozen network.

    The teacher, a network of any size, is first trained to reconstruct masked pixels, for instance
    by a run of ``mae``: ``method.teacher=RUN``.

    Loss: ``|p - LN(t)|`` of the patches of hidden blocks, with predictions p and the teacher's
    features t, normalized over features (LN).

    Use it in place of ``ijepa`` if a trained teacher exists: its targets do not change, so that
    losses of different steps, runs and network sizes can be compared.

    Implemented from the paper; not compared with results of the authors' code. The paper trains on
    videos, and trains its teacher with the masks of the student, whereas masks of ``mae`` are
    random.
    """

    paper = (
        "Li et al., Rethinking JEPA: Compute-Efficient Video SSL with Frozen Teachers, arXiv 2025"
    )
    distance = staticmethod(F.l1_loss)

    @dataclass(frozen=True, kw_only=True)
    class Config(BlockPrediction.Config):
        teacher: FrozenModule = trained_teacher()
        """Backbone whose features of patches are predicted."""

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Open the teacher, and build a network whose predictor has the teacher's width.

        Raises:
            UserError: If the teacher does not exist or has no patches, or if the method cannot
                train the backbone.
        """
        trained = self.open_trained("teacher", task)
        self.teacher = PatchTeacher(trained.network.backbone, "method.teacher")
        options = self.network_options(backbone)
        return build_kept_network(backbone, task, num_out=trained.width, **options)

    def draw_mask(self, seed: int, key: Tensor, grid: Grid) -> Kept:
        return Kept(*self.draw_blocks(seed, key, grid))

    def teacher_patches(self, images: Tensor) -> Tensor:
        """Return the teacher's patches (B, N, D), interpolated to the grid of the backbone."""
        _, patches = self.teacher.on_grid(images, self.grid_of(*images.shape[2:]))
        return patches
