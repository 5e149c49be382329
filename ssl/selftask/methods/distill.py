"""Distillation: a student learns the features or scores of a frozen teacher.

Hinton et al., Distilling the Knowledge in a Neural Network, 2015, arXiv:1503.02531, for logits.
Prototypes are matched as by Oquab et al., DINOv2, TMLR 2024, arXiv:2304.07193, section 5.

V: views; B: images per rank; E: features of the student; D: features or scores of the teacher.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.data.transforms.normalize import Normalize
from selftask.errors import UserError
from selftask.logs import get_logger
from selftask.methods.base import Method
from selftask.models.build import embed_dim
from selftask.models.clustering import sinkhorn_knopp
from selftask.models.heads import DINOHead
from selftask.models.network import Network
from selftask.models.precision import in_full_precision, to_float32
from selftask.models.teacher import FrozenTeacher
from selftask.models.weights.trained import TrainedNetwork, open_features, open_scores
from selftask.registry import register_method

if TYPE_CHECKING:
    from selftask.task import Task

log = get_logger(__name__)

LOSSES = {  # of each ``match``, the default first
    "features": ("cosine", "mse"),
    "logits": ("kl", "cross_entropy", "mse"),
    "prototypes": ("cross_entropy",),
}
TEMPERATURES = {"features": 1.0, "logits": 4.0, "prototypes": 0.1}
OPTIONS = {  # options that some ``match`` has only
    "project": ("features",),
    "label_weight": ("logits",),
    "temperature": ("logits", "prototypes"),
    "teacher_temperature": ("prototypes",),
    "targets": ("prototypes",),
}


@register_method("distill")
class Distill(Method):
    """Learn features, logits or prototypes of a trained teacher, which sees the same views."""

    loss_reduction = "samples"
    views = (1, None)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        teacher: str = setting(
            missing="give a run, an exported backbone.pt or timm:NAME",
            path=True,
            tiny="timm:test_vit",
        )
        """A run, an exported backbone.pt, ``timm:NAME`` or ``torchvision:NAME``; for logits and
        prototypes a run (``RUN@best``, ``RUN@STEP``), its checkpoint or ``timm:NAME``.
        """
        teacher_weights: str | None = setting(None, path=True, tiny="none")
        """For ``timm:`` and ``torchvision:``: a file, ``pretrained`` to fetch the library's own, or
        ``none`` for random ones.
        """
        trust: bool = False
        """Whether code that the teacher's files name may be imported."""
        match: Literal["features", "logits", "prototypes"] = "features"
        """What the student learns: pooled features, scores of classes, or scores of prototypes."""
        loss: Literal["auto", "cosine", "mse", "kl", "cross_entropy"] = "auto"
        """Distance of features: cosine (auto) or mse; of logits: kl (auto), cross_entropy or mse;
        of prototypes: cross_entropy.
        """
        project: Literal["auto", "linear", "none"] = "auto"
        """Layer between the student's features and the teacher's; auto: linear if their widths
        differ.
        """
        temperature: float | None = setting(None, above=0)
        """Temperature of the student, and of the teacher's logits; null: 4 for logits, 0.1 for
        prototypes.
        """
        label_weight: float = setting(0.0, min=0, max=1)
        """Weight of the cross-entropy with labels beside logits, which get the rest."""
        teacher_temperature: float | None = setting(None, above=0)
        """Temperature of the teacher's prototypes; null: that at the end of its run."""
        targets: Literal["auto", "softmax", "centering", "sinkhorn"] = "auto"
        """How the teacher's scores become probabilities; auto: as in its own training."""
        sinkhorn_iterations: int = setting(3, min=1)
        """Iterations of Sinkhorn-Knopp."""
        hidden_dim: int = setting(2048, min=1, tiny=32)
        """Width of the hidden layers of the student's head for prototypes."""
        bottleneck: int = setting(256, min=1, tiny=16)
        """Width of that head before its last layer."""
        num_layers: int = setting(3, min=1, max=100)
        """Layers of that head without the last."""

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
            unset = {"project": "auto", "targets": "auto", "label_weight": 0.0}
            for name, matches in OPTIONS.items():
                if getattr(self, name) != unset.get(name) and self.match not in matches:
                    yield f"{name}: has no effect with match: {self.match}; leave it out"

    center: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.loss = LOSSES[config.match][0] if config.loss == "auto" else config.loss
        self.temperature = config.temperature or TEMPERATURES[config.match]

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Read the teacher; build the student, with as many outputs as the teacher has.

        Raises UserError if the teacher is not there or does not fit.
        """
        trained = self.open_teacher(task)
        self.teacher = FrozenTeacher(trained.network)
        self.out_dim = trained.width
        if self.config.match == "prototypes":
            self._set_targets(trained)
        if self.config.label_weight:
            _check_labels(task.data_module.train_source, self.out_dim)
        return Network(backbone, self.build_head(embed_dim(backbone)))

    def open_teacher(self, task: Task) -> TrainedNetwork:
        """Return the trained network, after a warning if it is not, or sees other images."""
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

    def _set_targets(self, trained: TrainedNetwork) -> None:
        """Choose how scores become probabilities: as configured, or as in the teacher's run."""
        config, scores = self.config, trained.scores
        assert scores is not None
        self.power = scores.power
        self.how = scores.targets if config.targets == "auto" else config.targets
        self.teacher_temperature = config.teacher_temperature or scores.temperature
        if self.how == "centering" and scores.center is None:
            raise UserError(
                f"method.targets=centering: {config.teacher} has no centre; take softmax or "
                "sinkhorn"
            )
        center = scores.center if self.how == "centering" else torch.zeros(())
        self.register_buffer("center", center, persistent=False)  # of the teacher, as its weights

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build the student's head: (N, E) -> (N, D)."""
        config = self.config
        if config.match == "logits":
            return nn.Linear(embed_dim, self.out_dim)
        if config.match == "prototypes":
            return DINOHead(
                embed_dim,
                self.out_dim,
                hidden=config.hidden_dim,
                bottleneck=config.bottleneck,
                num_layers=config.num_layers,
            )
        if config.project == "linear" or (config.project == "auto" and embed_dim != self.out_dim):
            return nn.Linear(embed_dim, self.out_dim)
        if embed_dim != self.out_dim:
            raise UserError(
                f"method.project=none: the student has {embed_dim} features and the teacher "
                f"{self.out_dim}; project=linear maps one to the other"
            )
        return nn.Identity()

    def on_forward(self, task: Task) -> None:
        """Compute ``batch["targets"]`` (V, B, D) of all views."""
        batch = task.last_batch
        outputs = to_float32(self.teacher(batch.all_views))
        batch["targets"] = self.probabilities(outputs) if self._has_prototypes else outputs

    @property
    def _has_prototypes(self) -> bool:
        return bool(self.config.match == "prototypes")

    @torch.no_grad()
    def probabilities(self, scores: Tensor) -> Tensor:
        """Turn the teacher's scores (V, B, D) into probabilities of the same shape.

        Sinkhorn-Knopp balances the prototypes over the images of all ranks, view by view.
        """
        if self.how == "sinkhorn":
            balanced = partial(
                sinkhorn_knopp,
                epsilon=self.teacher_temperature,
                iterations=self.config.sinkhorn_iterations,
                power=self.power,
            )
            return torch.stack([balanced(view) for view in scores])
        return F.softmax((scores - self.center) / self.teacher_temperature, dim=2)

    def forward(self, output: Tensor, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Return the distance of ``output`` (V, B, D) from the targets, a mean over views.

        With ``label_weight`` w, it is weighted by 1 - w and the cross-entropy with labels by w, the
        latter summed over labelled images and divided by the number of all.
        """
        distance = self.distance(output, batch["targets"])
        weight = self.config.label_weight
        if not weight:
            return distance
        labels = label_cross_entropy(output, batch.labels)
        return {"distillation": (1 - weight) * distance, "labels": weight * labels}

    def distance(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the mean distance of the student from the teacher; both (V, B, D)."""
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
        return math.log(self.out_dim) if self._has_prototypes else None


def cosine_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Return 1 - cosine of features (..., D), a mean over rows."""
    return 1 - F.cosine_similarity(to_float32(student), teacher, dim=-1).mean()


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """Return -sum_k p log softmax(logits) of (..., K), a mean over rows."""
    return -(probs * F.log_softmax(to_float32(logits), dim=-1)).sum(dim=-1).mean()


@in_full_precision
def softened_distance(student: Tensor, teacher: Tensor, temperature: float, *, kl: bool) -> Tensor:
    """Return T^2 times KL divergence or cross-entropy at temperature T, a mean over rows.

    Section 2 of Hinton et al.: with T^2 the gradients do not depend on the scale of T.

    Args:
        student: Logits (..., K).
        teacher: Logits (..., K).
        temperature: T, of both.
        kl: Whether to subtract the teacher's entropy, which has no gradient.
    """
    probs = F.softmax(teacher / temperature, dim=-1)
    loss = soft_cross_entropy(student / temperature, probs)
    if kl:
        loss = loss - torch.special.entr(probs).sum(dim=-1).mean()
    return temperature**2 * loss


@in_full_precision
def label_cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of all views, summed over labelled images, over all images.

    Args:
        output: Logits (V, B, K).
        labels: (B,), -1 for none, or probabilities (B, K).
    """
    total = output.new_zeros(())
    for view in output:
        total = total + F.cross_entropy(view, labels, ignore_index=-1, reduction="sum")
    return total / (output.shape[0] * output.shape[1])


def _check_labels(source: Any, num_classes: int) -> None:
    """Raise UserError unless some images have labels, all of them classes of the teacher."""
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
    """Warn if the teacher was trained on images of another normalization."""
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
