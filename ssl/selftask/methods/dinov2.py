"""DINOv2: DINO for whole images, iBOT for masked patches, and KoLeo.

iBOT is Zhou et al., ICLR 2022, arXiv:2111.07832.

V: views, the first two of which are global and the others local; B: images per rank; N: patches of
a global view; M: masked patches of all global views on this rank; E: width of the backbone; K:
outputs of the heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import all_reduce_sum
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import EMATeacher, Schedule, teacher_momentum
from selftask.methods.families.prototypes import PrototypeHeads, log_target_entropy
from selftask.models.block_mask import BlockMask, MaskSampler
from selftask.models.build import embed_dim
from selftask.models.clustering import sinkhorn_knopp, view_cross_entropy
from selftask.models.features.extract import adapter_of
from selftask.models.losses.koleo import koleo
from selftask.models.network import Network, PatchOutput
from selftask.models.precision import in_full_precision, to_float32
from selftask.models.weights.trained import Scores
from selftask.random.keyed import uniform
from selftask.registry import register_method

NUM_GLOBAL = 2  # views that the teacher sees
SINKHORN_ITERATIONS = 3


class Masks(NamedTuple):
    """Masked patches of the global views."""

    mask: Tensor
    """(2 * B, N) bool, all first views, then all second views."""
    indices: Tensor
    """(M,) int64, of the masked patches among all 2 * B * N; of all patches for iBOT's teacher."""
    weights: Tensor
    """(M,) float32, 1 / number of masked patches in the same view."""


class Inputs(NamedTuple):
    """Argument of the network."""

    global_views: list[Tensor]
    """Two views of one size, (B, C, H, W) each."""
    local_views: list[Tensor]
    """(B, C, H', W') each."""
    masks: Masks
    is_student: bool
    """True to mask patches; the teacher gets whole views."""

    def whole(self) -> Inputs:
        """Return the global views without masks, as a teacher sees them."""
        return self._replace(local_views=[], is_student=False)


class Predictions(NamedTuple):
    """Scores of the two heads."""

    images: Tensor
    """(V, B, K), of pooled features."""
    patches: Tensor
    """(M, K), of the patches at ``Masks.indices``."""


@register_method("dinov2")
class DINOv2(PrototypeHeads, EMATeacher):
    """DINOv2 (arXiv:2304.07193): DINO for images, iBOT for masked patches, and spread-out features.

    Loss: ``DINO + iBOT - w mean log min_j |x_i - x_j|`` (section 4). The last term, KoLeo, is of
    the unit vectors x of images and has the weight w, ``koleo_weight``.

    Published: ImageNet k-NN and linear top-1 of ViT-L/16 81.6 and 82.9 after 100 epochs of ImageNet
    alone (authors' README).

    Use it for frozen features of images and of patches, with large batches.

    Differs from the authors' code:

    * Each global view is masked with probability ``mask_probability``; in the authors' code exactly
      this share of a GPU's views is masked.
    * KoLeo looks for neighbors in the global batch; in the authors' code, on each GPU separately,
      as with ``koleo_group_size`` = batch of a GPU. Means of patch scores for the center give each
      patch the same weight; in the authors' code, each GPU.
    * A block skips each image at random; in the authors' code it skips a fixed share of a GPU's
      batch.
    * Gradients are clipped together; in the authors' code, separately for backbone and heads.
    * The authors' code passes 1 - p to torchvision, so that its views are blurred with probability
      0, 0.9 and 0.5 instead of 1, 0.1 and 0.5. The recipes have the same effective probabilities.
      Here the kernel size is computed from sigma; in the authors' code it is 9 pixels.
    """

    paper = "Oquab et al., DINOv2: Learning Robust Visual Features without Supervision, TMLR 2024"
    columns = {
        "dino_global": "Term of the loss: DINO between global views.",
        "dino_local": "Term of the loss: DINO of local views.",
        "ibot": "Term of the loss: masked patches.",
        "koleo": "Term of the loss: embeddings are spread evenly.",
    }
    loss_reduction: ClassVar[Literal["samples", "gathered", "statistics"]] = "gathered"  # KoLeo
    sample_dim = None
    views = (2, None)
    min_batch_size = 2
    requires = ("tokens",)
    exports_teacher = True
    teacher_drop_path = False
    head_names = ("head", "patch_head")

    @dataclass(frozen=True, kw_only=True)
    class Config(PrototypeHeads.Config, EMATeacher.Config):
        tied_heads: bool = False
        """Whether images and patches share one head."""
        norm_last_layer: bool = True
        """Whether the rows of the last layers keep unit length; false: their lengths are trained,
        as in the published code.
        """
        targets: Literal["sinkhorn", "centering"] = "sinkhorn"
        """How the teacher's outputs become targets. sinkhorn: balanced over the batch of all ranks;
        centering: a running mean is subtracted before the softmax.
        """
        momentum: Schedule = teacher_momentum({"name": "cosine", "start": 0.992, "end": 1.0})
        """Momentum of the teacher."""
        mask_probability: float = setting(0.5, min=0, max=1)
        """Probability that a global view is masked."""
        mask_ratio: list[float] = setting([0.1, 0.5], min=0, max=1)
        """Smallest and largest share of masked patches of a masked view."""
        dino_weight: float = setting(1.0, min=0)
        """Weight of the image loss (DINO)."""
        ibot_weight: float = setting(1.0, min=0)
        """Weight of the masked-patch loss (iBOT)."""
        koleo_weight: float = setting(0.1, min=0)
        """Weight of KoLeo, which spreads the embeddings."""
        koleo_neighbors: int = setting(1, min=1)
        """Number of nearest neighbors from which KoLeo moves an embedding away."""
        koleo_group_size: int | None = setting(None, min=2, tiny=lambda batch: max(2, batch // 2))
        """Number of consecutive images of a batch, over all ranks, among which KoLeo looks for
        neighbors; null: the whole batch.
        """

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if len(self.mask_ratio) != 2 or self.mask_ratio[0] > self.mask_ratio[1]:
                yield (
                    f"mask_ratio: {self.mask_ratio}; the smallest and the largest share of masked "
                    "patches are expected, such as [0.1, 0.5]"
                )
            batch_size = config["train"]["batch_size"]
            group_size = self.koleo_group_size or batch_size
            if batch_size % group_size:
                yield (
                    f"koleo_group_size: {batch_size} images (train.batch_size) cannot be divided "
                    f"into groups of {group_size}"
                )
            elif self.koleo_weight and self.koleo_neighbors >= group_size:
                yield (
                    f"koleo_neighbors: an image has {group_size - 1} others to be compared with, "
                    f"not {self.koleo_neighbors}"
                )

    centers: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.register_buffer("centers", torch.zeros(2, config.out_dim))  # for images and patches

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        head = self.build_head(embed_dim(backbone))
        patch_head = head if self.config.tied_heads else self.build_patch_head(embed_dim(backbone))
        return DINOv2Network(backbone, head, patch_head)

    def build_head(self, embed_dim: int) -> nn.Module:
        return self.prototype_head(embed_dim, trained_length=not self.config.norm_last_layer)

    def build_patch_head(self, embed_dim: int) -> nn.Module:
        """Build a separate head for masked patches, by default like the head for images."""
        return self.build_head(embed_dim)

    def setup(self, task: Task) -> None:
        super().setup(task)
        self.grid_of = adapter_of(task.base_model.backbone).grid  # type: ignore[arg-type]

    def student_views(self, batch: Batch) -> list[Tensor]:
        """Return the views of the student, the global ones first: all views by default."""
        return batch.all_views

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        views = self.student_views(batch)
        batch["masks"] = self.drawn(batch, task)
        batch.input = Inputs(views[:NUM_GLOBAL], views[NUM_GLOBAL:], batch["masks"], True)

    def draw(self, seed: int, key: Tensor, sizes: list[tuple[int, int]]) -> Masks:
        return self.draw_masks(seed, key, self.grid_of(*sizes[0]))

    def draw_masks(self, seed: int, key: Tensor, grid: tuple[int, int]) -> Masks:
        """Draw masks for some of the global views, with a random mask ratio for each.

        Args:
            seed: Seed of the run.
            key: (B, 2) on the CPU, see ``random.keyed``.
            grid: Rows and columns of patches.
        """
        config, sampler = self.config, self.mask_sampler(grid)
        draws = uniform(seed, key, NUM_GLOBAL * (2 + sampler.num_draws))
        draws = draws.unflatten(1, (NUM_GLOBAL, -1)).transpose(0, 1).flatten(0, 1)  # (2 * B, ...)
        least, most = config.mask_ratio
        counts = (sampler.num_patches * (least + (most - least) * draws[:, 1])).long()
        counts = torch.where(draws[:, 0] < config.mask_probability, counts, 0)
        mask = sampler.from_draws(draws[:, 2:], counts)  # (2 * B, N)
        indices = mask.flatten().nonzero().squeeze(1)
        weights = (1 / mask.sum(dim=1)).repeat_interleave(mask.sum(dim=1))
        return Masks(mask, indices, weights)

    def mask_sampler(self, grid: tuple[int, int]) -> MaskSampler:
        """Return the sampler of masks for a grid of patches."""
        return BlockMask(grid)

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Compute targets from the teacher's scores of the unmasked global views.

        Sets ``batch["image_targets"]`` (2, B, K), ``batch["patch_targets"]`` (M, K) of the masked
        patches, and ``batch["teacher"]``, the teacher's whole output, for subclasses. The entropy
        of the image targets is logged as ``target_entropy``.
        """
        batch = task.last_batch
        batch["teacher"] = self.teacher_output(batch)
        predicted = batch["teacher"].prediction
        scores = [to_float32(predicted.images.flatten(0, 1)), to_float32(predicted.patches)]
        images, patches = (
            self.targets(rows, center, temperature)
            for rows, center, temperature in zip(
                (scores[0], self.masked_scores(scores[1], batch["masks"])),
                self.centers,
                self.teacher_temperatures(task.where),
                strict=True,
            )
        )
        batch["image_targets"] = images.unflatten(0, (NUM_GLOBAL, -1))  # (2, B, K)
        batch["patch_targets"] = patches  # (M, K)
        log_target_entropy(images, task)
        if task.train and self.config.targets == "centering":
            sums = [F.pad(rows.sum(dim=0), (0, 1), value=len(rows)) for rows in scores]
            self.pending.append(torch.stack(sums))  # (2, K + 1), with the number of scores

    def teacher_output(self, batch: Batch) -> PatchOutput:
        """Return the teacher's scores and features of the unmasked global views."""
        return self.teacher(self.teacher_input(batch))

    def teacher_input(self, batch: Batch) -> Inputs:
        """Return the argument of the teacher, which scores the patches of ``masks.indices``."""
        return batch.input.whole()

    def masked_scores(self, scores: Tensor, masks: Masks) -> Tensor:
        """Return the scores (M, K) of masked patches among the scores of the teacher's output.

        By default the teacher scores masked patches only, and its scores are returned unchanged.
        """
        return scores

    def teacher_temperatures(self, where: float) -> tuple[float, float]:
        """Return the temperatures of the teacher for images and patches."""
        temperature = self.teacher_temperature_at(where)
        return temperature, temperature

    def targets(self, scores: Tensor, center: Tensor, temperature: float) -> Tensor:
        """Turn the teacher's scores into targets.

        Args:
            scores: (n, K); n may differ between ranks.
            center: (K,), used by ``centering``.
            temperature: Temperature of the teacher.

        Returns:
            (n, K) probabilities.
        """
        if self.config.targets == "centering":
            return F.softmax((scores - center) / temperature, dim=1)
        return sinkhorn_knopp(scores, epsilon=temperature, iterations=SINKHORN_ITERATIONS)

    def forward(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the weighted terms of section 4; the DINO terms sum to a mean over pairs of views.

        ``output.prediction`` is a ``Predictions``. ``output.features`` are those of the global
        views: pooled (2 * B, E), patches (2 * B, N, E).
        """
        config, masks, predicted = self.config, batch["masks"], output.prediction
        log_probs = self.log_probs(predicted.images)  # (V, B, K)
        pairs = view_cross_entropy(batch["image_targets"], log_probs)  # (2, V)
        pairs = config.dino_weight * pairs / (pairs.numel() - NUM_GLOBAL)
        patches = patch_cross_entropy(
            predicted.patches, batch["patch_targets"], masks.weights, temperature=config.temperature
        )
        terms = {
            "dino_local": pairs[:, NUM_GLOBAL:].sum(),
            "dino_global": pairs[0, 1] + pairs[1, 0],
            "ibot": config.ibot_weight * patches / len(masks.mask),
        }
        if config.koleo_weight:
            views = output.features.pooled.chunk(NUM_GLOBAL)  # (B, E) each
            terms["koleo"] = config.koleo_weight * sum(
                koleo(view, neighbors=config.koleo_neighbors, group_size=config.koleo_group_size)
                for view in views
            )
        return terms

    @torch.no_grad()
    def on_update(self, task: Task) -> None:
        """Update the teacher and, for ``centering``, the centers with all ranks' mean scores."""
        super().on_update(task)
        if pending := self.take_pending():
            sums = all_reduce_sum(torch.stack(pending).sum(dim=0))  # (2, K + 1)
            number = sums[:, -1:]
            means = torch.where(number > 0, sums[:, :-1] / number.clamp(min=1), self.centers)
            self.centers.lerp_(means, 1.0 - self.config.center_momentum)

    def load_scores(self, embed_dim: int, checkpoint: Mapping[str, Any]) -> Scores:
        """Return the teacher's heads, with their last temperature and their centers."""
        images, patches = (
            self.teacher_scores(embed_dim, checkpoint, center, head=head)
            for head, center in zip(self.head_names, checkpoint["method"]["centers"], strict=True)
        )
        return replace(images, patches=patches)


class DINOv2Network(Network):
    """The backbone, an image head and a patch head: ``Inputs`` -> ``PatchOutput``.

    ``prediction`` of the output is ``Predictions``, and ``features`` are those of the global views.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module, patch_head: nn.Module) -> None:
        super().__init__(backbone, head)
        self.patch_head = patch_head
        self.mask_token = nn.Parameter(torch.zeros(adapter_of(backbone).mask_dim))

    def forward(self, inputs: Inputs) -> PatchOutput:  # type: ignore[override]
        masks, num_local = inputs.masks, len(inputs.local_views)
        features = self.extract(
            inputs.global_views,
            mask=masks.mask if inputs.is_student else None,
            mask_token=self.mask_token if inputs.is_student else None,
        )
        runs = groupby(inputs.local_views, key=lambda view: view.shape)  # a pass for each size
        local = [self.extract(list(views)).pooled for _, views in runs]
        pooled = torch.cat([features.pooled, *local])  # (V * B, E)
        masked = features.patches.flatten(0, 1)[masks.indices]  # (M, E)
        images = self.head(pooled).unflatten(0, (NUM_GLOBAL + num_local, -1))
        return PatchOutput(Predictions(images, self.patch_head(masked)), features, masks.mask)


@in_full_precision
def patch_cross_entropy(
    scores: Tensor, targets: Tensor, weights: Tensor, *, temperature: float
) -> Tensor:
    """Return the weighted sum of -sum_k p_k log q_k over M masked patches (eq. 2 of iBOT).

    Here p are the targets, and q = softmax(scores / temperature).

    Args:
        scores: Scores of the student, (M, K).
        targets: Probabilities of the teacher, (M, K).
        weights: Weight of each patch, (M,).
        temperature: Temperature of the student.
    """
    log_probs = F.log_softmax(scores / temperature, dim=1)
    return -((targets * log_probs).sum(dim=1) * weights).sum()
