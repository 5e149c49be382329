"""DetCon: contrast the segments of an image between two views.

V: views, B: images per rank, W: ranks, M: regions sampled in a view, R: points of a view in each
direction, E: width of the backbone, D: width of the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch, Draws
from selftask.config.fields import setting
from selftask.distributed.collectives import gather_cat_with_grad, rank
from selftask.errors import UserError
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import EMATeacher
from selftask.models.build import embed_dim
from selftask.models.heads import ProjectorPredictor, mlp
from selftask.models.network import Network
from selftask.models.precision import in_full_precision
from selftask.random.keyed import uniform
from selftask.registry import register_method

RESOLUTION = 56  # R, points of a view in each direction at which its segments are looked up
MAX_SEGMENTS = 256  # of an image

Inputs: TypeAlias = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Views (B, C, height, width), and the masks (B, M, R, R) bool of the sampled regions of each."""


@register_method("detcon")
class DetCon(EMATeacher):
    """DetCon (arXiv:2103.10957): recognizes segments of an image among those of all images.

    Loss: ``-log exp(cos(p, t)/tau) / sum exp(cos/tau)`` of a prediction p and a target t that show
    the same segment, over all regions, in both directions.

    Use it to pretrain for detection or segmentation. A grid of rectangles divides each image;
    better segments, such as those of Felzenszwalb and Huttenlocher in the paper, can be provided
    with the data (``masks``).

    Differs from the authors' code:

    * Segments are a grid by default; in the authors' code, those of Felzenszwalb and Huttenlocher.
    """

    paper = "Hénaff et al., Efficient Visual Pretraining with Contrastive Detection, ICCV 2021"
    loss_reduction = "gathered"  # regions are negatives to those of all ranks
    views = 2
    min_batch_size = 2
    requires = ("dense", "boxes")

    @dataclass(frozen=True, kw_only=True)
    class Config(EMATeacher.Config):
        out_dim: int = setting(256, min=1, tiny=16)
        """Width of the output of projector and predictor, D."""
        hidden_dim: int = setting(4096, min=1, tiny=32)
        """Width of the hidden layers of projector and predictor."""
        temperature: float = setting(0.1, above=0)
        """Temperature of the similarities, tau."""
        teacher: bool = True
        """Whether targets come from a teacher (DetCon-B); false: from the network's own
        projections, with gradient and without a predictor (DetCon-S).
        """
        num_regions: int = setting(16, min=1, tiny=4)
        """Number of regions sampled in each view, with replacement, M."""
        local_negatives: bool = True
        """Whether other segments of the same image are negatives."""
        grid: int = setting(5, min=1, max=16)
        """Number of rows, and of columns, of rectangles into which an image is divided."""
        masks: str | None = None
        """Name of an array among the extras of the data that divides images instead of the grid:
        segment numbers (h, w), uint8. All arrays have the same size, which may differ from the size
        of the images.
        """

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build the projector, and for DetCon-B BYOL's predictor."""
        dim, hidden_dim = self.config.out_dim, self.config.hidden_dim
        projector = mlp(embed_dim, hidden_dim, dim, last_bias=False)
        if not self.config.teacher:
            return projector
        return ProjectorPredictor(projector, mlp(dim, hidden_dim, dim, last_bias=False))

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        return RegionNetwork(backbone, self.build_head(embed_dim(backbone)))

    def averaged(self, network: Any) -> nn.Module:
        """Return backbone and projector; the teacher has no predictor."""
        return RegionNetwork(network.backbone, network.head.projector)

    def setup(self, task: Task) -> None:
        if self.config.teacher:
            super().setup(task)

    def draw(self, seed: int, key: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
        """Draw numbers from [0, 1) that select the regions of both views, (B, 2, M)."""
        return uniform(seed, key, 2 * self.config.num_regions).unflatten(1, (2, -1))

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Sample regions of both views, and set the input to views and masks, see ``Inputs``.

        Sets ``batch["ids"]`` (2, B, M), the segments of the regions.
        """
        segments = self.segments(batch)
        masks, ids = [], []
        draws = (draw for group in batch.draws.values() for draw in group)
        for draw, numbers in zip(draws, self.drawn(batch, task).unbind(1), strict=True):
            in_view = segments_in_view(segments, draw)
            ids.append(sample_segments(in_view, numbers))
            masks.append(in_view[:, None] == ids[-1][..., None, None])
        batch.input, batch["ids"] = (batch.all_views, masks), torch.stack(ids)

    def segments(self, batch: Batch) -> Tensor:
        """Return the segment number of each part of the images, (B, h, w) int64.

        Raises:
            UserError: If the masks of the data are not uint8 (h, w).
        """
        name = self.config.masks
        if name is not None:
            masks = batch.extras[name]
            if masks.dtype != torch.uint8 or masks.ndim != 3:
                raise UserError(
                    f"method.masks: {name!r} of an image is {masks.dtype} of shape "
                    f"{tuple(masks.shape[1:])}; segment numbers (h, w) in uint8 are expected"
                )
            return masks.long()
        size = self.config.grid
        cells = torch.arange(size**2, device=batch.index.device).view(size, size)
        return cells.expand(len(batch.index), size, size)

    def on_forward(self, task: Task) -> None:
        if self.config.teacher:
            task.last_batch["projection"] = self.teacher(task.last_batch.input)  # (2, B, M, D)

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss of both directions, added.

        Args:
            output: Projections and predictions (2, B, M, 2, D), or without a teacher only
                projections (2, B, M, D).
            batch: The batch.
        """
        prediction = target = output
        if self.config.teacher:
            prediction, target = output[..., 1, :], batch["projection"]
        losses = [
            region_contrast(
                prediction[view],
                (target[view], target[1 - view]),
                (batch["ids"][view], batch["ids"][1 - view]),
                temperature=self.config.temperature,
                local_negatives=self.config.local_negatives,
            )
            for view in range(2)
        ]
        return losses[0] + losses[1]

    def on_update(self, task: Task) -> None:
        if self.config.teacher:
            super().on_update(task)


class RegionNetwork(Network):
    """Network from views and masks to outputs of regions (V, B, M, ...), one view per pass.

    A region's features are the mean of the cells of the feature map, weighted by the share of each
    cell that the mask covers.
    """

    def forward(self, inputs: Inputs) -> Tensor:  # type: ignore[override]
        outputs = []
        for view, masks in zip(*inputs, strict=True):
            tokens = self.extract(view).tokens
            assert tokens.grid is not None
            shares = F.adaptive_avg_pool2d(masks.to(view.dtype), tokens.grid)
            shares = shares.flatten(2)  # (B, M, N)
            regions = shares @ tokens.patches / shares.sum(dim=2, keepdim=True)  # (B, M, E)
            outputs.append(self.head(regions.flatten(0, 1)).unflatten(0, regions.shape[:2]))
        return torch.stack(outputs)


def segments_in_view(segments: Tensor, draw: Draws) -> Tensor:
    """Return the segment numbers at the points of a view, (B, R, R).

    Points outside of an image belong to the nearest segment.

    Args:
        segments: Segment numbers of the images, (B, h, w).
        draw: Augmentation parameters of the view.
    """
    rows, columns = segments.shape[1:]
    x, y = draw.centers(RESOLUTION, RESOLUTION).unbind(2)  # (B, R * R), pixels
    height, width = draw.image_size.split(1, dim=1)  # (B, 1)
    column = (x / width * columns).long().clamp(0, columns - 1)
    row = (y / height * rows).long().clamp(0, rows - 1)
    in_view = segments.flatten(1).gather(1, row * columns + column)
    return in_view.unflatten(1, (RESOLUTION, RESOLUTION))


def sample_segments(in_view: Tensor, numbers: Tensor) -> Tensor:
    """Sample segments of a view uniformly and with replacement, regardless of their size.

    Args:
        in_view: Segment numbers of the points of the view, (B, R, R).
        numbers: Uniform random numbers from [0, 1), (B, M).

    Returns:
        Segment numbers, (B, M).
    """
    exists = in_view.new_zeros(len(in_view), MAX_SEGMENTS).scatter_(1, in_view.flatten(1), 1)
    count = exists.cumsum(dim=1)  # (B, 256); the last column is the number of segments
    return torch.searchsorted(count, (numbers * count[:, -1:]).long(), right=True)


@in_full_precision
def region_contrast(
    prediction: Tensor,
    targets: tuple[Tensor, Tensor],
    ids: tuple[Tensor, Tensor],
    *,
    temperature: float,
    local_negatives: bool = True,
) -> Tensor:
    """Return the mean cross-entropy of a view's regions with those of the same segment.

    The negatives are the regions of other segments, in both views of all images of all ranks. The
    weight of a region is 1 / number of regions of its segment in its view, or 0 if the other view
    has no region of this segment.

    Args:
        prediction: Regions of the view, (B, M, D), not necessarily normalized.
        targets: Targets of the regions of the same view, and of the other one, (B, M, D) each.
        ids: Segment numbers (B, M) of the same view, and of the other one.
        temperature: tau.
        local_negatives: Whether regions of the same image are negatives.
    """
    own, other = (gather_cat_with_grad(F.normalize(target, dim=2)) for target in targets)
    everyone = torch.stack([own, other])  # (2, WB, M, D)
    query = F.normalize(prediction, dim=2)
    logits = torch.einsum("bmd,vcnd->bmvcn", query, everyone) / temperature  # (B, M, 2, WB, M)

    same, positive = (ids[0][:, :, None] == of_view[:, None] for of_view in ids)  # (B, M, M)
    row = torch.arange(len(query), device=query.device)
    column = row + rank() * len(query)
    hidden = torch.zeros_like(logits, dtype=torch.bool)
    hidden[row, :, 0, column] = same if local_negatives else torch.ones_like(same)
    hidden[row, :, 1, column] = ~(positive | local_negatives)
    normalizer = logits.masked_fill(hidden, -torch.inf).flatten(2).logsumexp(dim=2)  # (B, M)

    number = positive.sum(dim=2)
    attraction = (logits[row, :, 1, column] * positive).sum(dim=2) / number.clamp(min=1)
    weight = (number > 0) / same.sum(dim=2).to(logits.dtype)
    return (weight * (normalizer - attraction)).mean()
