"""I-JEPA: predict the features of several blocks of an image from another block.

The loss is the smooth L1 distance of the published code; the paper has L2.

B: images per rank, N: patches of an image, E: width of the backbone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.methods.base import Task
from selftask.methods.families.block_prediction import BlockPrediction
from selftask.methods.families.ema_teacher import EMATeacher, Schedule, teacher_momentum
from selftask.methods.families.masked_patches import Kept, MaskedPatches, build_kept_network
from selftask.models.build import embed_dim
from selftask.models.features.extract import FeatureExtractor
from selftask.models.features.tokens import Grid
from selftask.registry import register_method


@register_method("ijepa")
class IJEPA(BlockPrediction, MaskedPatches, EMATeacher):
    """I-JEPA (arXiv:2301.08243): predicts features of hidden blocks of an image from the rest.

    Loss: ``smooth_l1(p, t)`` of the patches of hidden blocks, with predictions p and the teacher's
    normalized features t.

    Use it for transformers, without color augmentation, in long runs.

    Differs from the authors' code:

    * Each image has its own block sizes, scale and aspect are drawn separately, and blocks can be
      anywhere, as in the paper. The published code draws one size for a batch, with scale and
      aspect from the same number; never places a block on the last row or column (here 12 % of
      targets touch the last row); and truncates every block to the smallest of the batch. With
      sizes per batch, the targets of an image would depend on the other images of its batch, and
      thus on the number of ranks.
    * If a context has too few patches, targets may overlap it, the last target first; the authors'
      code first tries other positions.
    * Learning rate and weight decay are those of the current step; in the authors' code, those of
      the next step (``scheduler.step()`` comes first).
    * Recipes for networks much narrower than a ViT-B (digits, ``images``, CIFAR-10) set
      ``init_std: null``.
    """

    paper = (
        "Assran et al., Self-Supervised Learning from Images with a Joint-Embedding Predictive "
        "Architecture, CVPR 2023"
    )
    exports_teacher = True  # as in the paper's evaluations
    distance = staticmethod(F.smooth_l1_loss)

    @dataclass(frozen=True, kw_only=True)
    class Config(BlockPrediction.Config, EMATeacher.Config):
        momentum: Schedule = teacher_momentum({"name": "linear", "start": 0.996, "end": 1.0})
        """Momentum of the teacher."""

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Build the network with fixed positions and initial weights, see ``init_std``.

        A loaded backbone keeps its weights and positions.
        """
        options = self.network_options(backbone)
        return build_kept_network(backbone, task, num_out=embed_dim(backbone), **options)

    def averaged(self, network: Any) -> nn.Module:
        return FeatureExtractor(network.backbone)

    def draw_mask(self, seed: int, key: Tensor, grid: Grid) -> Kept:
        return Kept(*self.draw_blocks(seed, key, grid))

    def teacher_patches(self, images: Tensor) -> Tensor:
        return self.teacher(images).tokens.patches  # (B, N, E)
