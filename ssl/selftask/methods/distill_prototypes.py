"""Distillation of prototypes: a student learns a frozen teacher's prototype assignments.

Prototypes of images and of patches are matched as in section 5 of DINOv2 (arXiv:2304.07193): with
the losses of DINO and iBOT, and no masks.

V: views; A: views that the teacher sees; B: images per rank; M: patches of these A * B images; E:
features of the student; K: prototypes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema import FrozenModule, total_views
from selftask.errors import UserError
from selftask.methods.base import Task
from selftask.methods.families.distillation import Distillation, trained_teacher
from selftask.models.build import embed_dim
from selftask.models.clustering import swapped_cross_entropy
from selftask.models.distillation.patch_scores import (
    ImageAndPatchScores,
    PatchScoreNetwork,
    check_same_patches,
)
from selftask.models.distillation.score_targets import ScoreTargets
from selftask.models.heads import DINOHead
from selftask.models.losses.distillation import soft_cross_entropy
from selftask.models.precision import to_float32
from selftask.models.weights.frozen import Frozen
from selftask.models.weights.trained import Scores, TrainedNetwork
from selftask.registry import register_method

NUM_GLOBAL = 2  # views that the teacher sees with ``pairs: different``


@register_method("distill_prototypes")
class DistillPrototypes(Distillation):
    """Distillation of prototypes (arXiv:2304.07193): a student learns a teacher's assignments.

    Loss: ``-sum_k t_k log softmax(s/tau)_k`` of the student's scores s and the teacher's
    probabilities t of prototypes k, for images and optionally patches.

    Published: ImageNet linear top-1 of ViT-S/14 81.1, ViT-B/14 84.5, ViT-L/14 86.3, all distilled
    from ViT-g (DINOv2's README).

    Use it if the teacher is a run of ``dino``, ``ibot`` or ``dinov2``.
    """

    paper = "Oquab et al., DINOv2: Learning Robust Visual Features without Supervision, TMLR 2024"
    columns = {
        "images": "Term of the loss: prototypes of whole images.",
        "patches": "Term of the loss: patches.",
    }

    @dataclass(frozen=True, kw_only=True)
    class Config(Distillation.Config):
        teacher: FrozenModule = trained_teacher("give a run of dino, dinov2, msn or swav")
        """Network whose prototypes are learned: a run of a method that has some, ``RUN@best``,
        ``RUN@STEP``, a checkpoint, or ``timm:NAME``, whose classes then serve as prototypes.
        """
        targets: Literal["auto", "softmax", "centering", "sinkhorn"] = "auto"
        """How the teacher's scores become probabilities. softmax: by a softmax; centering: by a
        softmax of the scores minus the teacher's center; sinkhorn: balanced over the batch by
        Sinkhorn-Knopp; auto: as in the teacher's own training.
        """
        temperature: float = setting(0.1, above=0)
        """Temperature of the student."""
        teacher_temperature: float | None = setting(None, above=0)
        """Temperature of the teacher; null: its value at the end of the teacher's run."""
        sinkhorn_iterations: int = setting(3, min=1)
        """Number of iterations of Sinkhorn-Knopp."""
        pairs: Literal["same", "different"] = "same"
        """Views whose prototypes are compared. same: each view of the student with the same view of
        the teacher. different, for multi-crop: the teacher sees the first two views only, and each
        of them is compared with all other views of the student.
        """
        patch_weight: float = setting(0.0, min=0, max=1)
        """Weight of the loss of patches' prototypes; images get 1 - patch_weight. Needs a teacher
        with a head for patches (iBOT, DINOv2).
        """
        hidden_dim: int = setting(2048, min=1, tiny=32)
        """Width of the hidden layers of the student's head."""
        bottleneck: int = setting(256, min=1, tiny=16)
        """Width of the student's head before its last layer."""
        num_layers: int = setting(3, min=1, max=100)
        """Number of layers of the student's head including the bottleneck, without the last
        layer.
        """

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if self.pairs == "different" and total_views(config["views"]) < NUM_GLOBAL:
                yield "pairs: 'different' compares views, and `views` makes one; views.main.count=2"
            if self.patch_weight and config["train"]["step"]["name"] == "grad_cache":
                yield "patch_weight: train.step=grad_cache divides the scores of images only"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.num_seen = NUM_GLOBAL if config.pairs == "different" else None  # A; None: all

    def open_teacher(self, task: Task) -> TrainedNetwork:
        trained = super().open_teacher(task)
        assert trained.scores is not None
        self.targets = self.build_targets(trained.scores)
        return trained

    def build_head(self, embed_dim: int) -> nn.Module:
        return self.build_prototypes(embed_dim, self.out_dim)

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Build the student; with ``patch_weight``, teacher and student have two heads.

        Raises:
            UserError: As ``open_teacher``; with ``patch_weight``, also if the teacher has no head
                for patches, or another grid of patches.
        """
        if not self.config.patch_weight:
            return super().build_network(backbone, task)
        trained = self.open_teacher(task)
        patches = trained.scores.patches if trained.scores else None
        if patches is None:
            raise UserError(
                f"method.patch_weight: {self._address} scores whole images and no patches; take a "
                "teacher with a head for patches (iBOT, DINOv2), or leave it out"
            )
        of_teacher, width = trained.network.backbone, embed_dim(backbone)
        check_same_patches(backbone, of_teacher)
        self.patch_targets = self.build_targets(patches)
        self.patch_dim = patches.width(of_teacher)
        self.teacher = Frozen(PatchScoreNetwork(of_teacher, trained.network.head, patches.head))
        widths = (self.out_dim, self.patch_dim)
        heads = [self.build_prototypes(width, num_prototypes) for num_prototypes in widths]
        return PatchScoreNetwork(backbone, *heads, num_patch_views=self.num_seen)

    def build_targets(self, scores: Scores) -> ScoreTargets:
        """Return the module that turns scores into probabilities.

        Raises:
            UserError: If ``centering`` is configured and the teacher has no center.
        """
        config = self.config
        how = scores.targets if config.targets == "auto" else config.targets
        if how == "centering" and scores.center is None:
            raise UserError(
                f"method.targets=centering: {self._address} has no center; take softmax or sinkhorn"
            )
        iterations, temperature = config.sinkhorn_iterations, config.teacher_temperature
        return ScoreTargets(scores, how=how, temperature=temperature, iterations=iterations)

    def build_prototypes(self, embed_dim: int, num_prototypes: int) -> nn.Module:
        """Build a head of the student: (N, E) -> (N, K)."""
        config = self.config
        return DINOHead(
            embed_dim,
            num_prototypes,
            hidden=config.hidden_dim,
            bottleneck=config.bottleneck,
            num_layers=config.num_layers,
        )

    @property
    def _address(self) -> str:
        return FrozenModule.of(self.config.teacher).model

    def on_forward(self, task: Task) -> None:
        """Compute the teacher's targets for images, ``batch["targets"]`` (A, B, K).

        With ``patch_weight``, also compute ``batch["patch_targets"]`` (M, K) for the patches.
        """
        batch = task.last_batch
        scores = self.teacher(batch.all_views[: self.num_seen])
        if self.config.patch_weight:
            patches = to_float32(scores.patches)[None]  # balanced as one view
            batch["patch_targets"] = self.patch_targets(patches)[0]  # (M, K)
            scores = scores.images
        batch["targets"] = self.targets(to_float32(scores))

    def forward(
        self, output: Tensor | ImageAndPatchScores, batch: Batch
    ) -> Tensor | dict[str, Tensor]:
        """Return the cross-entropy of the scores (V, B, K) with the teacher's targets.

        With ``patch_weight`` w, the term of images is weighted by 1 - w, and the term of patches,
        a mean over all patches, by w.
        """
        config = self.config
        if not isinstance(output, ImageAndPatchScores):
            return self.cross_entropy(output, batch["targets"])
        weight, scores = config.patch_weight, to_float32(output.patches) / config.temperature
        images = self.cross_entropy(output.images, batch["targets"])
        patches = soft_cross_entropy(scores, batch["patch_targets"])
        return {"images": (1 - weight) * images, "patches": weight * patches}

    def cross_entropy(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of scores (V, B, K) with targets (A, B, K).

        It is a mean over images, and over views or pairs of different views.
        """
        scores = to_float32(output) / self.config.temperature
        if self.config.pairs == "different":
            return swapped_cross_entropy(targets, F.log_softmax(scores, dim=2))
        return soft_cross_entropy(scores, targets)

    @property
    def chance_loss(self) -> float:
        """Loss of equal probabilities: ln(prototypes of the teacher); with ``patch_weight``, the
        weighted mean over images and patches.
        """
        weight = self.config.patch_weight
        of_patches = math.log(self.patch_dim) if weight else 0.0
        return (1 - weight) * math.log(self.out_dim) + weight * of_patches
