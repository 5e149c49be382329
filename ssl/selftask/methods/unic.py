"""UNIC: a student learns the features of several frozen teachers, for images and for patches.

Section 3 of the paper. With ``drop_probability: 0`` the loss is a mean over all teachers, as in
RADIO (arXiv:2312.06709). Additional students learn from the same pass of the teachers, as in DINOv3
(arXiv:2508.10104, section 5.3).

B: images per rank, N: patches of the student, T: teachers, D: width of a teacher, E: width
of the student.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema import Component, FrozenModule
from selftask.distributed.collectives import all_reduce_mean
from selftask.errors import UserError
from selftask.methods.base import Method, Task
from selftask.methods.frozen import open_trained
from selftask.models.build import build_backbone, embed_dim
from selftask.models.distillation.patch_targets import PatchTeacher, PooledTeacher
from selftask.models.distillation.standardize import RunningMoments, moments_of, standardize
from selftask.models.features.extract import adapter_of, offers
from selftask.models.features.tokens import Grid
from selftask.models.heads import mlp
from selftask.models.network import Network
from selftask.models.precision import in_full_precision
from selftask.optim.schedules import build_schedule
from selftask.random.keyed import uniform
from selftask.registry import register_method

_TEST_VIT = FrozenModule(model="timm:test_vit", weights="none")


@register_method("unic")
class UNIC(Method):
    """UNIC (arXiv:2408.05088): a student learns the features of several frozen teachers at once.

    Loss: ``(1 - cos(s, t))/2 + smooth_l1(s, t)/2`` of the student's outputs s and the standardized
    features t of a teacher, mean over teachers that are kept (eq. 5).

    Published: ImageNet top-1 of ViT-B/16 83.8 from four teachers (authors' README).

    Use it to combine several frozen networks in one.

    Differs from the authors' code:

    * Means and variances of the teachers' features are exact over ranks and steps: the variance
      includes the movement of the mean. They include the current step; in the authors' code, only
      earlier steps.
    * Hidden layers that feed the heads are normalized (LayerNorm).
    * Features of teachers with another grid of patches are interpolated.
    """

    paper = (
        "Sariyildiz et al., UNIC: Universal Classification Models via Multi-teacher Distillation, "
        "ECCV 2024"
    )
    columns = {
        "pooled": "Term of the loss: features of images, a sum over students.",
        "patches": "Term of the loss: patches.",
    }
    loss_reduction = "statistics"  # moments of the teachers, and the number of dropped terms
    views = 1
    min_batch_size = 2
    sample_dim = None

    @dataclass(frozen=True, kw_only=True)
    class Config:
        teachers: dict[str, FrozenModule] = setting(
            missing="give some by name: {dino: RUN, clip: {model: timm:NAME, weights: FILE}}",
            tiny={"first": _TEST_VIT, "second": _TEST_VIT},
        )
        """Teachers by name: runs, exported files, ``timm:NAME`` or ``package.module:Class``."""
        students: dict[str, Component] = setting({}, of="backbones")
        """Additional students by name, which learn from the same pass of the teachers as the
        backbone: ``{small: {name: timm, model: vit_small_patch16_224}}``. They begin with random
        weights, have their own heads, and are written to the folders ``export/NAME``.
        """
        patch_weight: float = setting(0.5, min=0, max=1)
        """Weight of the features of patches; those of images get 1 - patch_weight. 0 for students
        or teachers without patches.
        """
        cosine_weight: float = setting(0.5, min=0)
        """Weight of 1 - cosine in the distance of two features."""
        smooth_l1_weight: float = setting(0.5, min=0)
        """Weight of the smooth L1 distance."""
        drop_probability: float = setting(0.5, min=0, max=1)
        """Probability that a teacher is dropped for an image. The teacher with the largest loss is
        always kept.
        """
        hidden_dim: int = setting(1536, min=1, tiny=32)
        """Width of the hidden layer of the heads."""
        ladder: list[int] = setting([])
        """Indices of the student's hidden layers that the heads get in addition to the last layer
        (the ladder of projectors). They must have the width of the last layer.
        """
        moments_share: float | dict[str, Any] = setting(
            {"name": "cosine", "start": 1.0, "end": 0.001}, of="schedules", min=0, max=1
        )
        """Share of each step in the running moments of the teachers' features."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if not self.teachers:
                yield "teachers: give at least one, such as {dino: RUN}"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.kinds = ("pooled", "patches") if config.patch_weight else ("pooled",)
        weights = {"pooled": 1 - config.patch_weight, "patches": config.patch_weight}
        self.weights: Tensor  # (kinds,)
        values = torch.tensor([weights[kind] for kind in self.kinds])
        self.register_buffer("weights", values, persistent=False)

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Open the teachers, and build the student with heads for each of them.

        Raises:
            UserError: If a teacher does not exist, or a network lacks the patches or layers that
                the config needs.
        """
        self.teachers, self.widths = nn.ModuleList(), list[int]()
        for name, module in self.config.teachers.items():
            key = f"method.teachers.{name}"
            trained = open_trained(module, key, task)
            kind = PatchTeacher if "patches" in self.kinds else PooledTeacher
            self.teachers.append(kind(trained.network.backbone, key))
            self.widths.append(trained.width)
        self.moments = RunningMoments(len(self.kinds) * sum(self.widths))
        network = self.build_student(backbone)
        for name, component in self.config.students.items():
            student = build_backbone(component, task.data_module.channels)
            self.check_grid(student, backbone, f"method.students.{name}")
            network.further[name] = self.build_student(student)
        return network

    def build_student(self, backbone: nn.Module) -> StudentNetwork:
        """Build a student with heads for each teacher.

        Raises:
            UserError: If the student lacks layers of the ladder, or patches that the loss needs.
        """
        self.check_student(backbone)
        config, width = self.config, embed_dim(backbone)
        heads = nn.ModuleList(
            LadderHead(width, len(config.ladder), config.hidden_dim, out_dim)
            for out_dim in self.widths
            for _ in self.kinds
        )
        return StudentNetwork(backbone, heads, kinds=self.kinds, ladder=tuple(config.ladder))

    def further_backbones(self) -> dict[str, Component]:
        return self.config.students

    def check_grid(self, student: nn.Module, backbone: nn.Module, key: str) -> None:
        """Raise UserError if patches are needed, and the student's differ from the backbone's."""
        if "patches" not in self.kinds or "dense" not in offers(student):
            return
        theirs, ours = adapter_of(student).stride, adapter_of(backbone).stride
        if theirs != ours:
            raise UserError(
                f"{key}: its patches are {theirs} pixels apart, and those of the backbone {ours}; "
                "students share the targets of patches, so take equal ones, or patch_weight: 0"
            )

    def check_student(self, backbone: nn.Module) -> None:
        """Raise UserError if the student lacks layers of the ladder or patches for the loss."""
        kind, ladder = type(backbone).__name__, self.config.ladder
        if "patches" in self.kinds and "dense" not in offers(backbone):
            raise UserError(
                f"method.patch_weight: a {kind} gives one vector an image and no patches; set it "
                "to 0"
            )
        if not ladder:
            return
        adapter = adapter_of(backbone)
        is_transformer = {"hidden", "tokens"} <= adapter.offers
        if not is_transformer or adapter.stride != adapter.patch_size[0]:
            raise UserError(
                f"method.ladder: its layers must have the width and patches of the last, and those "
                f"of a {kind} have not; set it to []"
            )
        if not -adapter.num_layers <= min(ladder) <= max(ladder) < adapter.num_layers:
            raise UserError(
                f"method.ladder={ladder}: the student has {adapter.num_layers} hidden layers, "
                f"numbered from 0 to {adapter.num_layers - 1}"
            )

    def setup(self, task: Task) -> None:
        super().setup(task)
        self.moments_share_at = build_schedule(self.config.moments_share, task.length)

    def draw(self, seed: int, key: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
        """Draw which teachers are dropped for an image, bool (B, T)."""
        draws = uniform(seed, key, len(self.config.teachers))
        return self.config.drop_probability > draws

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        (batch.input,) = batch.all_views
        batch["dropped"] = self.drawn(batch, task).T  # (T, B)

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Compute ``batch["targets"]``: standardized features in the order of the heads.

        They are (B, D) for images, (B, N, D) for patches.
        """
        batch = task.last_batch
        grid = batch.output.grid
        teachers: Any = self.teachers
        features = [
            rows for teacher in teachers for rows in teacher.on_grid(batch.input, grid)
        ]  # (B, D) and (B, N, D)
        moments = self.moments.moments
        if task.train:
            step = moments_of(features), self.moments_share_at(task.where)
            moments = self.moments.moved(*step)
            self.pending.append(step)
        batch["targets"] = standardize(features, moments)

    def forward(self, output: Predictions, batch: Batch) -> dict[str, Tensor]:
        """Return the terms of eq. 5, averaged over images and the teachers kept for each.

        Each student gets the gradients that it would get alone: the loss is a sum over students.
        The terms are ``pooled`` and, if patches have a weight, ``patches``.
        """
        students = [output.of_heads, *output.of_further]
        terms = torch.stack([self.student_terms(outputs, batch) for outputs in students]).sum(dim=0)
        return dict(zip(self.kinds, terms, strict=True))

    def student_terms(self, predictions: list[Tensor], batch: Batch) -> Tensor:
        """Return the terms of one student, (kinds,), from the output of each of its heads."""
        distances = self.distances(predictions, batch["targets"])  # (T, kinds, B)
        kept = kept_teachers(distances.sum(dim=1), batch["dropped"])  # (T, B)
        number = all_reduce_mean(kept.sum().to(distances.dtype))
        return (distances * kept[:, None]).sum(dim=(0, 2)) / number

    def distances(self, predictions: list[Tensor], targets: list[Tensor]) -> Tensor:
        """Return the weighted distance for each teacher, kind of features and image, (T, kinds, B).

        Args:
            predictions: Output of each head, (B, D) or (B, N, D).
            targets: Target of each head, in the shape of its output.
        """
        config, num_kinds = self.config, len(self.kinds)
        losses = [
            feature_distance(*pair, cosine=config.cosine_weight, smooth_l1=config.smooth_l1_weight)
            for pair in zip(predictions, targets, strict=True)
        ]
        by_teacher = torch.stack(losses).unflatten(0, (-1, num_kinds))  # (T, kinds, B)
        return by_teacher * self.weights[:, None]

    @torch.no_grad()
    def on_update(self, task: Task) -> None:
        """Move the moments toward the moments of this step's batches."""
        for step in self.take_pending():
            self.moments.keep(self.moments.moved(*step))


class Predictions(NamedTuple):
    """Output of the students."""

    of_heads: list[Tensor]
    """Output of each head: (B, D) for images or (B, N, D) for patches."""
    grid: Grid | None
    """Rows and columns of the N patches; None if there are none."""
    of_further: Sequence[list[Tensor]] = ()
    """Output of each head of the additional students."""


class StudentNetwork(Network):
    """Backbone with a head for each teacher and kind of features.

    Args:
        backbone: The backbone.
        heads: Heads of the first teacher, in the order of ``kinds``, then of the second, ...
        kinds: ``("pooled",)`` or ``("pooled", "patches")``.
        ladder: Indices of the hidden layers that the heads get in addition to the last layer.

    Attributes:
        further: Networks of the additional students by name, which get the same images.
    """

    head: nn.ModuleList

    def __init__(
        self,
        backbone: nn.Module,
        heads: nn.ModuleList,
        *,
        kinds: Sequence[str],
        ladder: Sequence[int],
    ) -> None:
        super().__init__(backbone, heads)
        self.kinds = kinds
        self.ladder = ladder
        self.further = nn.ModuleDict()

    def forward(self, images: Tensor) -> Predictions:  # type: ignore[override]
        """Return the output of each head, and of additional students, for images (B, C, H, W)."""
        if self.ladder or "patches" in self.kinds:
            features = self.extract(images, layers=self.ladder)
            grid, hidden = features.tokens.grid, features.hidden.values()
            inputs = {
                "pooled": [features.pooled, *(layer.class_token[:, 0] for layer in hidden)],
                "patches": [features.patches, *(layer.patches for layer in hidden)],
            }
        else:  # any network
            grid, inputs = None, {"pooled": [self.pooled([images])]}
        heads: Iterable[nn.Module] = self.head  # type: ignore[assignment]
        outputs = [head(*inputs[kind]) for head, kind in zip(heads, cycle(self.kinds))]
        further = [student(images).of_heads for student in self.further.values()]
        return Predictions(outputs, grid, further)


class LadderHead(nn.Module):
    """Sum of an mlp for the last layer and one for each layer of the ladder: (..., E) -> (..., D).

    Args:
        embed_dim: Width of the layers, E.
        num_hidden: Number of layers of the ladder.
        hidden_dim: Width of the hidden layer of an mlp.
        out_dim: Width of the teacher, D.
    """

    def __init__(self, embed_dim: int, num_hidden: int, hidden_dim: int, out_dim: int) -> None:
        super().__init__()
        sizes = embed_dim, hidden_dim, out_dim
        self.last = mlp(*sizes, norm=False, activation=nn.GELU)
        self.ladder = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(embed_dim), *mlp(*sizes, norm=False, activation=nn.GELU))
            for _ in range(num_hidden)
        )

    def forward(self, last: Tensor, *hidden: Tensor) -> Tensor:
        output: Tensor = self.last(last)
        for head, layer in zip(self.ladder, hidden, strict=True):
            output = output + head(layer)
        return output


@in_full_precision
def feature_distance(
    prediction: Tensor, target: Tensor, *, cosine: float, smooth_l1: float
) -> Tensor:
    """Return the distance of features for each image, a mean over its patches: (B,).

    Args:
        prediction: (B, D) or (B, N, D).
        target: Like ``prediction``.
        cosine: Weight of 1 - cosine.
        smooth_l1: Weight of the smooth L1 distance, a mean over D.
    """
    angles = 1 - F.cosine_similarity(prediction, target, dim=-1)
    lengths = F.smooth_l1_loss(prediction, target, reduction="none").mean(dim=-1)
    distance = cosine * angles + smooth_l1 * lengths  # (B,) or (B, N)
    return distance.flatten(1).mean(dim=1) if distance.ndim > 1 else distance


@torch.no_grad()
def kept_teachers(losses: Tensor, dropped: Tensor) -> Tensor:
    """Return which teachers count for an image: those not dropped, and that with the largest loss.

    Args:
        losses: (T, B).
        dropped: (T, B) bool.

    Returns:
        (T, B) bool.
    """
    return ~dropped | (losses == losses.amax(dim=0))
