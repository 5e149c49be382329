"""EsViT: DINO for whole views, and for regions of views, matched by their features.

V: views, the first two of which are global; B: images per rank; N: regions of a view, the cells of
its feature map; K: outputs of a head; E: width of the backbone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.base import Task
from selftask.methods.dino import DINO, NUM_GLOBAL
from selftask.methods.families.prototypes import log_target_entropy
from selftask.models.build import embed_dim
from selftask.models.network import Network, PatchOutput
from selftask.models.precision import in_full_precision, to_float32
from selftask.registry import register_method


class Predictions(NamedTuple):
    """Outputs of the two heads."""

    images: Tensor
    """(V, B, K)."""
    regions: list[Tensor]
    """(B, N, K) of each view."""
    features: list[Tensor]
    """(B, N, E) of each view, by which regions are matched; without gradient."""


@register_method("esvit")
class EsViT(DINO):
    """EsViT (arXiv:2106.09785): DINO for whole views, and for regions matched by features.

    Loss: ``(1 - w) DINO + w (-mean_i sum_k t_k log softmax(s_i/tau)_k)``, where s_i are the scores
    of the student's region i, and t is the target of the teacher's most similar region.

    Published: ImageNet k-NN and linear top-1 of Swin-T 75.7 and 78.0, Swin-S 77.7 and 79.5, Swin-B
    78.9 and 80.4 (authors' README).

    Use it for transformers with stages, such as Swin, and for convolutional networks.

    Differs from the authors' code:

    * Prototypes keep unit length, as in DINO; in the authors' command their lengths are trained.
    """

    paper = (
        "Li et al., Efficient Self-supervised Vision Transformers for Representation Learning, "
        "ICLR 2022"
    )
    columns = {
        "views": "Term of the loss: whole views.",
        "regions": "Term of the loss: regions of the views.",
    }
    requires = ("dense",)
    sample_dim = None
    head_names = ("head", "region_head")

    @dataclass(frozen=True, kw_only=True)
    class Config(DINO.Config):
        region_weight: float = setting(0.5, min=0, max=1)
        """Weight of the loss of regions, w."""

    region_center: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.register_buffer("region_center", torch.zeros(config.out_dim))  # (K,)

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        width = embed_dim(backbone)
        return RegionNetwork(backbone, self.build_head(width), self.build_head(width))

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Compute the teacher's targets for global views and their regions.

        Sets ``batch["probs"]`` (2, B, K), and, of each global view, ``batch["region_probs"]``
        (B, N, K) and ``batch["region_features"]`` (B, N, E). The entropy of the targets of views is
        logged as ``target_entropy``.
        """
        batch = task.last_batch
        output = self.teacher(batch.all_views[:NUM_GLOBAL]).prediction
        scores = to_float32(output.images)  # (2, B, K)
        of_regions = [to_float32(view) for view in output.regions]  # (B, N, K) each
        temperature = self.teacher_temperature_at(task.where)
        batch["probs"] = F.softmax((scores - self.center) / temperature, dim=2)
        batch["region_probs"] = [
            F.softmax((view - self.region_center) / temperature, dim=2) for view in of_regions
        ]
        batch["region_features"] = output.features
        log_target_entropy(batch["probs"], task)
        if task.train:
            mean = torch.stack([view.mean(dim=(0, 1)) for view in of_regions]).mean(dim=0)
            self.pending.append((scores.mean(dim=(0, 1)), mean))

    def centers(self) -> tuple[Tensor, ...]:
        return self.center, self.region_center

    def forward(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the terms of the loss, averaged over pairs of a global and another view.

        ``output.prediction`` is a ``Predictions``.
        """
        predicted, weight = output.prediction, self.config.region_weight
        terms = super().forward(predicted.images, batch)
        regions = region_cross_entropy(
            batch["region_probs"],
            batch["region_features"],
            [self.log_probs(view) for view in predicted.regions],
            predicted.features,
        )
        return {"views": (1 - weight) * sum(terms.values()), "regions": weight * regions}


class RegionNetwork(Network):
    """Backbone, and heads for views and regions; ``prediction`` of its output is ``Predictions``.

    Consecutive views of one size share a pass of the backbone. ``features`` of the output is a
    list, with an item per pass.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module, region_head: nn.Module) -> None:
        super().__init__(backbone, head)
        self.region_head = region_head

    def forward(self, views: Sequence[Tensor]) -> PatchOutput:  # type: ignore[override]
        num_images = len(views[0])
        ends = [
            number
            for number in range(1, len(views) + 1)
            if number == len(views) or views[number].shape != views[number - 1].shape
        ]
        passes = [self.extract(views[start:end]) for start, end in pairwise([0, *ends])]
        images = self.head(torch.cat([features.pooled for features in passes]))
        cells = [  # (B, N, E) for each view
            view for features in passes for view in features.patches.split(num_images)
        ]
        scores = self.region_head(torch.cat([view.flatten(0, 1) for view in cells]))
        regions = [
            of_view.unflatten(0, view.shape[:2])
            for of_view, view in zip(
                scores.split([view.shape[:2].numel() for view in cells]), cells, strict=True
            )
        ]
        predicted = Predictions(
            images.unflatten(0, (len(views), num_images)),
            regions,
            [view.detach() for view in cells],
        )
        return PatchOutput(predicted, passes)


@in_full_precision
def region_cross_entropy(
    probs: list[Tensor], features: list[Tensor], log_probs: list[Tensor], cells: list[Tensor]
) -> Tensor:
    """Return the cross-entropy of regions with their matches, averaged over pairs of views.

    Args:
        probs: Targets of the teacher's regions, (B, N', K) for each global view.
        features: Features of these regions, (B, N', E).
        log_probs: Log-probabilities of the student's regions, (B, N, K) for each of V views.
        cells: Features of these regions, (B, N, E).
    """
    losses = []
    for target, (prob, feature) in enumerate(zip(probs, features, strict=True)):
        for view, (log_prob, cell) in enumerate(zip(log_probs, cells, strict=True)):
            if view == target:
                continue
            match = nearest_regions(cell, feature)[..., None].expand_as(log_prob)
            losses.append(-(prob.gather(1, match) * log_prob).sum(dim=2).mean())
    return torch.stack(losses).mean()


@torch.no_grad()
def nearest_regions(cells: Tensor, others: Tensor) -> Tensor:
    """Return the index of the region with the largest cosine for each cell, (B, N).

    Args:
        cells: (B, N, E).
        others: Regions to choose from, (B, N', E).
    """
    return (F.normalize(cells, dim=2) @ F.normalize(others, dim=2).mT).argmax(dim=2)
