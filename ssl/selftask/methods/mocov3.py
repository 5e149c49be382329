"""MoCo v3: contrast a prediction with a teacher's projections of all images of the batch.

B: images per rank, D: width of projector and predictor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema.optimizer import GroupRule
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import ProjectorTeacher, Schedule, teacher_momentum
from selftask.models.heads import ProjectorPredictor, mlp
from selftask.models.losses.contrast import gathered_cross_entropy
from selftask.models.precision import in_full_precision
from selftask.models.predictors.patch_predictor import fix_sincos_positions
from selftask.registry import register_method


@register_method("mocov3")
class MoCoV3(ProjectorTeacher):
    """MoCo v3 (arXiv:2104.02057): recognizes a teacher's output for the other view in the batch.

    Loss: ``2 tau CE(q1.k2/tau)`` of the predictions q1 for one view and the teacher's outputs k2
    for the other views of the batch, and the same with the views exchanged (algorithm 1).

    Published: ImageNet linear top-1 of ResNet-50 72.8 after 300 epochs, 74.6 after 1000 (authors'
    README).

    Use it for contrastive learning with large batches, also of transformers.

    Differs from the authors' code:

    * The teacher is updated after a step, in the authors' code before the next one. The only
      difference is the momentum, which is that of the previous step.
    * Initial weights are torch's and timm's; in the authors' code a transformer's layers have
      Xavier's.
    """

    paper = "Chen et al., An Empirical Study of Training Self-Supervised Vision Transformers, 2021"
    loss_reduction = "gathered"  # negatives are the teacher's outputs on all ranks
    views = 2
    min_batch_size = 2

    @dataclass(frozen=True, kw_only=True)
    class Config(ProjectorTeacher.Config):
        momentum: Schedule = teacher_momentum({"name": "cosine", "start": 0.99, "end": 1.0})
        """Momentum of the teacher."""
        out_dim: int = setting(256, min=1, tiny=16)
        """Width of the output of projector and predictor, D."""
        hidden_dim: int = setting(4096, min=1, tiny=32)
        """Width of the hidden layers of projector and predictor."""
        projector_layers: int = setting(3, min=1)
        """Number of layers of the projector; 2 for a ResNet in the paper."""
        predictor_norm: bool = True
        """Whether BatchNorm follows the predictor; not for a ResNet in the paper."""
        temperature: float = setting(0.2, above=0)
        """Temperature of the similarities, tau; 1.0 for a ResNet in the paper."""
        freeze_patches: bool = False
        """Whether the patch projection of a vision transformer keeps its initial weights, which
        makes training more stable (section 4.2).
        """
        fixed_positions: bool = False
        """Whether a vision transformer has fixed sine-cosine positions, as in the paper; one that
        ``init`` loads keeps its own.
        """

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        if self.config.fixed_positions and task.config.init.backbone is None:
            fix_sincos_positions(backbone)
        return super().build_network(backbone, task)

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build projector and predictor, without biases; last BatchNorms have no scale or shift."""
        config = self.config
        hidden = [config.hidden_dim] * (config.projector_layers - 1)
        projector = _mlp(embed_dim, *hidden, config.out_dim, last_norm=True)
        sizes = config.out_dim, config.hidden_dim, config.out_dim
        return ProjectorPredictor(projector, _mlp(*sizes, last_norm=config.predictor_norm))

    def group_rules(self) -> list[GroupRule]:
        """Freeze the patch projection if ``freeze_patches`` is set."""
        rule = GroupRule(match="network.backbone.patch_embed", freeze=True)
        return [*super().group_rules(), *([rule] if self.config.freeze_patches else [])]

    def on_forward(self, task: Task) -> None:
        task.last_batch["keys"] = self.teacher(task.last_batch.input)  # (2, B, D)

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss of algorithm 1 for ``output`` (2, B, 2, D), both directions summed."""
        prediction = output[:, :, 1]
        return prediction_loss(prediction, batch["keys"], temperature=self.config.temperature)

    @property
    def chance_loss(self) -> float:
        """Loss of equal similarities: 4 * ``temperature`` * ln(batch)."""
        return 4 * self.config.temperature * math.log(self.batch_size)


def _mlp(*sizes: int, last_norm: bool) -> nn.Sequential:
    return mlp(*sizes, bias=False, last_bias=False, last_norm=last_norm, last_affine=False)


@in_full_precision
def prediction_loss(prediction: Tensor, key: Tensor, *, temperature: float) -> Tensor:
    """Return 2 tau times the cross-entropy of predictions with keys, summed over both directions.

    The positive of a prediction is the key of the other view, among the keys of all ranks.

    Args:
        prediction: (2, B, D), not necessarily normalized.
        key: Teacher's projections (2, B, D), not necessarily normalized.
        temperature: tau.
    """
    queries, keys = F.normalize(prediction, dim=2), F.normalize(key, dim=2)
    first = gathered_cross_entropy(queries[0], keys[1], scale=1 / temperature)
    second = gathered_cross_entropy(queries[1], keys[0], scale=1 / temperature)
    return 2 * temperature * (first + second)
