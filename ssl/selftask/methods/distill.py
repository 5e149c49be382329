"""Distillation: a student learns the features or scores of a frozen teacher.

Hinton et al., Distilling the Knowledge in a Neural Network, 2015, arXiv:1503.02531, for logits.
Prototypes of images and of patches are matched as by Oquab et al., DINOv2, TMLR 2024,
arXiv:2304.07193, section 5: with the losses of DINO and iBOT, and no masks.

V: views; A: those that the teacher sees; B: images per rank; M: patches of these A * B images; E:
features of the student; D: features or scores of the teacher; K: prototypes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import default_of, setting
from selftask.config.schema import total_views
from selftask.data.transforms.normalize import Normalize
from selftask.errors import UserError
from selftask.logs import get_logger
from selftask.methods.base import Method
from selftask.models.build import embed_dim
from selftask.models.clustering import swapped_cross_entropy
from selftask.models.distillation.patch_scores import (
    ImageAndPatchScores,
    PatchScoreNetwork,
    check_same_patches,
)
from selftask.models.distillation.score_targets import ScoreTargets
from selftask.models.heads import DINOHead
from selftask.models.losses.distillation import (
    cosine_distance,
    label_cross_entropy,
    soft_cross_entropy,
    softened_distance,
)
from selftask.models.network import Network
from selftask.models.precision import to_float32
from selftask.models.teacher import FrozenTeacher
from selftask.models.weights.trained import Scores, TrainedNetwork, open_features, open_scores
from selftask.registry import register_method

if TYPE_CHECKING:
    from selftask.task import Task

log = get_logger(__name__)

LOSSES = {  # for each ``match``; the first is the default
    "features": ("cosine", "mse"),
    "logits": ("kl", "cross_entropy", "mse"),
    "prototypes": ("cross_entropy",),
}
TEMPERATURES = {"features": 1.0, "logits": 4.0, "prototypes": 0.1}
OPTIONS = {  # options for some values of ``match`` only
    "project": ("features",),
    "label_weight": ("logits",),
    "temperature": ("logits", "prototypes"),
    "teacher_temperature": ("prototypes",),
    "targets": ("prototypes",),
    "pairs": ("prototypes",),
    "patch_weight": ("prototypes",),
}
NUM_GLOBAL = 2  # views that the teacher sees with ``pairs: different``


@register_method("distill")
class Distill(Method):
    """Learning of a trained teacher's features, logits or prototypes for the same views."""

    loss_reduction = "samples"
    views = (1, None)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        teacher: str = setting(
            missing="give a run, an exported backbone.pt or timm:NAME",
            path=True,
            tiny="timm:test_vit",
        )
        """A run, an exported backbone.pt, ``timm:NAME`` or ``torchvision:NAME``. For logits and
        prototypes: a run, ``RUN@best``, ``RUN@STEP``, a checkpoint, or ``timm:NAME``.
        """
        teacher_weights: str | None = setting(None, path=True, tiny="none")
        """Weights of ``timm:`` and ``torchvision:`` models: a file, ``pretrained`` to download the
        library's weights, or ``none`` for random ones.
        """
        trust: bool = False
        """Whether code named in the teacher's files may be imported."""
        match: Literal["features", "logits", "prototypes"] = "features"
        """What the student learns: pooled features, scores of classes, or scores of prototypes."""
        loss: Literal["auto", "cosine", "mse", "kl", "cross_entropy"] = "auto"
        """Distance of features: cosine (auto) or mse; of logits: kl (auto), cross_entropy or mse;
        of prototypes: cross_entropy.
        """
        project: Literal["auto", "linear", "none"] = "auto"
        """Layer from the student's features to the teacher's; auto: linear if widths differ."""
        temperature: float | None = setting(None, above=0)
        """Temperature of the student, and of the teacher's logits; null: 4 for logits, 0.1 for
        prototypes.
        """
        label_weight: float = setting(0.0, min=0, max=1)
        """Weight of the cross-entropy with labels, in addition to logits, which get 1 -
        label_weight.
        """
        teacher_temperature: float | None = setting(None, above=0)
        """Temperature of the teacher's prototypes; null: the one at the end of its run."""
        targets: Literal["auto", "softmax", "centering", "sinkhorn"] = "auto"
        """How the teacher's scores become probabilities; auto: as in its own training."""
        sinkhorn_iterations: int = setting(3, min=1)
        """Iterations of Sinkhorn-Knopp."""
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
        """Width of the hidden layers of the student's head for prototypes."""
        bottleneck: int = setting(256, min=1, tiny=16)
        """Width of that head before its last layer."""
        num_layers: int = setting(3, min=1, max=100)
        """Number of layers of that head, without the last layer."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            of_library = self.teacher.startswith(("timm:", "torchvision:"))
            if of_library and self.teacher_weights is None:
                yield (
                    f"teacher_weights: {self.teacher} needs a file of weights, 'pretrained' to "
                    "fetch the library's own, or 'none' for random ones"
                )
            if not of_library and self.teacher_weights is not None:
                yield (
                    "teacher_weights: is for timm:NAME and torchvision:NAME; "
                    f"{self.teacher} has its own"
                )
            if self.loss not in ("auto", *LOSSES[self.match]):
                known = ", ".join(LOSSES[self.match])
                yield f"loss: {self.loss!r} is not for match: {self.match}, which has {known}"
            unset = {field.name: default_of(field) for field in fields(self)}
            for name, matches in OPTIONS.items():
                if getattr(self, name) != unset[name] and self.match not in matches:
                    yield f"{name}: has no effect with match: {self.match}; leave it out"
            if self.pairs == "different" and total_views(config["views"]) < NUM_GLOBAL:
                yield "pairs: 'different' compares views, and `views` makes one; views.main.count=2"
            step = config["train"]["step"]
            name = step if isinstance(step, str) else step["name"]
            if self.patch_weight and name == "grad_cache":
                yield "patch_weight: train.step=grad_cache divides the scores of images only"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.loss = LOSSES[config.match][0] if config.loss == "auto" else config.loss
        self.temperature = config.temperature or TEMPERATURES[config.match]
        self.num_taught = NUM_GLOBAL if config.pairs == "different" else None  # A; None: all

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Read the teacher and build a student with as many outputs.

        Raises UserError if the teacher does not exist or does not match.
        """
        trained = self.open_teacher(task)
        self.out_dim = trained.width
        if self.config.label_weight:
            _check_labels(task.data_module.train_source, self.out_dim)
        if self._has_prototypes:
            assert trained.scores is not None
            self.targets = self.build_targets(trained.scores)
        if self.config.patch_weight:
            return self.build_patch_network(backbone, trained)
        self.teacher = FrozenTeacher(trained.network)
        return Network(backbone, self.build_head(embed_dim(backbone)))

    def build_patch_network(self, backbone: nn.Module, trained: TrainedNetwork) -> nn.Module:
        """Set the teacher with its head for patches, and return a student with two heads.

        Raises UserError if the teacher has no such head, or another grid of patches.
        """
        assert trained.scores is not None
        patches = trained.scores.patches
        if patches is None:
            raise UserError(
                f"method.patch_weight: {self.config.teacher} scores whole images and no patches; "
                "take a teacher with a head for patches (iBOT, DINOv2), or leave it out"
            )
        of_teacher, width = trained.network.backbone, embed_dim(backbone)
        check_same_patches(backbone, of_teacher)
        self.patch_targets = self.build_targets(patches)
        self.patch_dim = patches.width(of_teacher)
        self.teacher = FrozenTeacher(
            PatchScoreNetwork(of_teacher, trained.network.head, patches.head)
        )
        heads = self.build_head(width), self.build_prototypes(width, self.patch_dim)
        return PatchScoreNetwork(backbone, *heads, num_patch_views=self.num_taught)

    def open_teacher(self, task: Task) -> TrainedNetwork:
        """Return the trained network; warn if its weights are random or of other normalization."""
        config = self.config
        read = open_features if config.match == "features" else open_scores
        try:
            trained = read(config.teacher, weights=config.teacher_weights, trust=config.trust)
        except UserError as error:
            reason = str(error).removeprefix("backbone.model: ")
            raise UserError(f"method.teacher={config.teacher}: {reason}") from error
        if trained.channels != task.data_module.channels:
            raise UserError(
                f"method.teacher: {config.teacher} takes images of {trained.channels} channels, "
                f"and the data have {task.data_module.channels}"
            )
        if config.teacher_weights == "none":
            log.warning(
                "method.teacher: %s has random weights (method.teacher_weights=none), and nothing "
                "to teach",
                config.teacher,
            )
        else:
            shown = [transform.to_dict() for transform in task.config.eval.transforms]
            _compare_normalization(trained, shown)
        return trained

    def build_targets(self, scores: Scores) -> ScoreTargets:
        """Choose how scores become probabilities: as configured, or as in the teacher's run."""
        config = self.config
        how = scores.targets if config.targets == "auto" else config.targets
        if how == "centering" and scores.center is None:
            raise UserError(
                f"method.targets=centering: {config.teacher} has no centre; take softmax or "
                "sinkhorn"
            )
        iterations, temperature = config.sinkhorn_iterations, config.teacher_temperature
        return ScoreTargets(scores, how=how, temperature=temperature, iterations=iterations)

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build the student's head: (N, E) -> (N, D)."""
        config = self.config
        if config.match == "logits":
            return nn.Linear(embed_dim, self.out_dim)
        if config.match == "prototypes":
            return self.build_prototypes(embed_dim, self.out_dim)
        if config.project == "linear" or (config.project == "auto" and embed_dim != self.out_dim):
            return nn.Linear(embed_dim, self.out_dim)
        if embed_dim != self.out_dim:
            raise UserError(
                f"method.project=none: the student has {embed_dim} features and the teacher "
                f"{self.out_dim}; project=linear maps one to the other"
            )
        return nn.Identity()

    def build_prototypes(self, embed_dim: int, num_prototypes: int) -> nn.Module:
        """Build a head of the student for prototypes: (N, E) -> (N, K)."""
        config = self.config
        return DINOHead(
            embed_dim,
            num_prototypes,
            hidden=config.hidden_dim,
            bottleneck=config.bottleneck,
            num_layers=config.num_layers,
        )

    def on_forward(self, task: Task) -> None:
        """Compute ``batch["targets"]`` (A, B, D), and for patches ``batch["patch_targets"]``."""
        batch = task.last_batch
        outputs = self.teacher(batch.all_views[: self.num_taught])
        if self.config.patch_weight:
            patches = to_float32(outputs.patches)[None]  # balanced as one view
            batch["patch_targets"] = self.patch_targets(patches)[0]  # (M, K)
            outputs = outputs.images
        outputs = to_float32(outputs)
        batch["targets"] = self.targets(outputs) if self._has_prototypes else outputs

    @property
    def _has_prototypes(self) -> bool:
        return bool(self.config.match == "prototypes")

    def forward(
        self, output: Tensor | ImageAndPatchScores, batch: Batch
    ) -> Tensor | dict[str, Tensor]:
        """Return the distance of the scores or features (V, B, D) from the targets.

        With ``patch_weight`` w, the distance of images is weighted by 1 - w, and that of patches, a
        mean over all patches, by w. With ``label_weight`` w, the distance is weighted by 1 - w, and
        the cross-entropy with labels by w. That cross-entropy is a sum over labelled images divided
        by the number of all images.
        """
        config = self.config
        if isinstance(output, ImageAndPatchScores):
            weight, scores = config.patch_weight, to_float32(output.patches) / self.temperature
            images = self.distance(output.images, batch["targets"])
            patches = soft_cross_entropy(scores, batch["patch_targets"])
            return {"images": (1 - weight) * images, "patches": weight * patches}
        distance, weight = self.distance(output, batch["targets"]), config.label_weight
        if not weight:
            return distance
        labels = label_cross_entropy(output, batch.labels)
        return {"distillation": (1 - weight) * distance, "labels": weight * labels}

    def distance(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the distance of the student (V, B, D) from the teacher (A, B, D).

        It is a mean over images, and over views or pairs of different views.
        """
        if self.config.pairs == "different":
            log_probs = F.log_softmax(to_float32(output) / self.temperature, dim=2)
            return swapped_cross_entropy(targets, log_probs)
        if self._has_prototypes:
            return soft_cross_entropy(to_float32(output) / self.temperature, targets)
        if self.loss == "cosine":
            return cosine_distance(output, targets)
        if self.loss == "mse":
            return F.mse_loss(to_float32(output), targets)
        return softened_distance(output, targets, self.temperature, kl=self.loss == "kl")

    @property
    def chance_loss(self) -> float | None:
        """Loss if the student gives every prototype the same probability."""
        if not self._has_prototypes:
            return None
        weight = self.config.patch_weight
        of_patches = math.log(self.patch_dim) if weight else 0.0
        return (1 - weight) * math.log(self.out_dim) + weight * of_patches


def _check_labels(source: Any, num_classes: int) -> None:
    """Raise UserError unless some images have labels, all of which are classes of the teacher."""
    if source is None:  # a ``Learner``, whose labels come with the batches
        return
    labels = source.labels
    high = -1 if labels is None else int(labels.max(initial=-1))
    if high < 0:
        raise UserError(
            "method.label_weight: needs labels, and these images have none; put those of each "
            "class into a folder of its own, or set label_weight=0"
        )
    if high >= num_classes:
        raise UserError(
            f"data: its labels go up to {high}, and the teacher has {num_classes} classes; set "
            "method.label_weight=0 to learn from its logits alone"
        )


def _compare_normalization(trained: TrainedNetwork, shown: list[dict[str, Any]]) -> None:
    """Warn if the teacher was trained on images with another normalization."""
    moments = []
    for transforms in (trained.transforms, shown):
        found = [t for t in transforms if t["name"] == "normalize"]
        if not found:
            return
        args = {key: value for key, value in found[-1].items() if key != "name"}
        moments.append(Normalize(**args).moments(trained.channels))
    (mean, std), (our_mean, our_std) = moments
    pairs = zip((*mean, *std), (*our_mean, *our_std), strict=True)
    if any(abs(theirs - ours) > 1e-3 for theirs, ours in pairs):
        log.warning(
            "method.teacher: it was trained on images with mean %s and std %s, and the views have "
            "%s and %s; set views and eval.transforms to the teacher's",
            *(mean, std, our_mean, our_std),
        )
