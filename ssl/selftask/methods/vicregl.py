"""VICRegL: VICReg of whole views and of matching patches, by location or by features.

V: views, the first two of which are large; B: images per rank; N: cells of a view's feature map;
M: matched cells; D: width of the projector, L: of the local projector.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import all_gather_cat, world_size
from selftask.methods.base import Method
from selftask.models.build import embed_dim
from selftask.models.features.tokens import gather_tokens
from selftask.models.heads import mlp
from selftask.models.losses.image_products import has_few_images
from selftask.models.losses.variance_covariance import variance_covariance
from selftask.models.network import Network, PatchOutput
from selftask.models.precision import in_full_precision, to_float32
from selftask.registry import register_method

if TYPE_CHECKING:
    from selftask.task import Task

NUM_LARGE = 2  # views, each compared with all others


@register_method("vicregl")
class VICRegL(Method):
    """VICRegL (arXiv:2210.01571): VICReg of whole views and of matching cells.

    Differs from the authors' code:

    * By location, 20 cells of each large view and 4 of each small one are matched; there 20 of the
      first view of a pair and 4 of the second, whatever their sizes.
    * Positions of cells follow a flipped crop; there flips are ignored (``--no-flip-grid 1``).
    * The standard deviation of red is 0.229, there 0.228.
    * The local loss is the mean over all pairs of views, as there since d14c226 of December 2022.
      The lower rate of the local projector that its options name (``--maps-lr-ratio``) reaches no
      parameter there.
    * ConvNeXt: a layer scale that stays 1 instead of none, so that the weights are timm's.
    """

    paper = (
        "Bardes et al., VICRegL: Self-Supervised Learning of Local Visual Features, NeurIPS 2022"
    )
    columns = {
        "global_TERM": "Term of the loss, of whole views.",
        "local_TERM": "Term of the loss, of cells.",
    }
    loss_reduction = "statistics"  # variances and covariances
    sample_dim = None
    min_batch_size = 2
    views = (2, None)
    requires = ("dense", "boxes")  # cells are matched by location in the image

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(8192, min=1, tiny=16)
        """Width of the head's output, D."""
        hidden_dim: int = setting(8192, min=1, tiny=32)
        """Width of the projector's two hidden layers."""
        local_dim: int = setting(512, min=1, tiny=8)
        """Width of the projector of cells and of its hidden layers, L."""
        norm: Literal["batch", "layer"] = "batch"
        """Norm between the projectors' layers; the published code has LayerNorm with a ConvNeXt."""
        alpha: float = setting(0.75, min=0, max=1)
        """Weight of the loss of whole views; cells get 1 - alpha."""
        num_matches: int = setting(20, min=1, tiny=2)
        """Number of best pairs of cells for a large view, gamma."""
        num_small_matches: int = setting(4, min=1, tiny=2)
        """Number of best pairs of cells for each other view."""
        match_all_features: bool = True
        """Whether all cells are used when matching by features."""
        invariance_weight: float = setting(25.0, min=0)
        """Weight of the invariance term."""
        variance_weight: float = setting(25.0, min=0)
        """Weight of the variance term."""
        covariance_weight: float = setting(1.0, min=0)
        """Weight of the covariance term."""

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build the projectors of pooled features and of cells; both end with a linear layer."""
        hidden, local = self.config.hidden_dim, self.config.local_dim
        norm = nn.LayerNorm if self.config.norm == "layer" else nn.BatchNorm1d
        build = partial(mlp, embed_dim, norm=norm, last_bias=False)
        return nn.ModuleDict(
            {
                "pooled": build(hidden, hidden, self.config.out_dim),
                "cells": build(local, local, local),
            }
        )

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        return LocalNetwork(backbone, self.build_head(embed_dim(backbone)))

    def on_forward(self, task: Task) -> None:
        """Compute ``batch["centers"]``, the position of each cell in the image."""
        batch = task.last_batch
        draws = [draw for group in batch.draws.values() for draw in group]
        maps = batch.output.prediction["cells"]  # (B, L, h, w) for each view
        batch["centers"] = [  # (B, N, 2) each
            draw.centers(*cells.shape[2:]) for draw, cells in zip(draws, maps, strict=True)
        ]

    def forward(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the weighted terms of equation 5."""
        config, predicted = self.config, output.prediction
        whole = global_terms([to_float32(view) for view in predicted["pooled"]])
        cells = [to_float32(cells).flatten(2).mT for cells in predicted["cells"]]  # (B, N, L)
        matches = [
            config.num_matches if view < NUM_LARGE else config.num_small_matches
            for view in range(len(cells))
        ]
        all_cells = [view.shape[1] for view in cells]
        by_features = all_cells if config.match_all_features else matches
        local = local_terms(cells, batch["centers"], by_features, matches)
        names = ("invariance", "variance", "covariance")
        weights = (config.invariance_weight, config.variance_weight, config.covariance_weight)
        terms = {}
        for kind, share, values in (
            ("global", config.alpha, whole),
            ("local", 1 - config.alpha, local),
        ):
            for name, weight, value in zip(names, weights, values, strict=True):
                terms[f"{kind}_{name}"] = share * weight * value
        return terms


class Match(NamedTuple):
    """M cells of a view and their nearest neighbors in another one."""

    view: int
    other: int
    cells: Tensor
    """(B, M), indices."""
    neighbors: Tensor
    """(B, M), indices of the other view's cells."""


class LocalNetwork(Network):
    """Views -> ``pooled`` (B, D) and ``cells`` (B, L, h, w) of each view; one view per pass.

    ``features`` is a list, since views may have different sizes.
    """

    def forward(self, views: Sequence[Tensor]) -> PatchOutput:  # type: ignore[override]
        heads: Any = self.head
        of_views = [self.extract(view) for view in views]
        predicted: dict[str, list[Tensor]] = {"pooled": [], "cells": []}
        for features in of_views:
            predicted["pooled"].append(heads["pooled"](features.pooled))
            cells = heads["cells"](features.patches.flatten(0, 1))  # (B * N, L)
            cells = cells.unflatten(0, (len(features.pooled), -1)).mT  # (B, L, N)
            assert features.tokens.grid is not None
            predicted["cells"].append(cells.unflatten(2, features.tokens.grid))
        return PatchOutput(predicted, of_views)


def pairs_of_views(num_views: int) -> list[tuple[int, int]]:
    """Return pairs of each large view with every other view."""
    return [(i, j) for i, j in product(range(NUM_LARGE), range(num_views)) if i != j]


def global_terms(views: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return invariance, variance and covariance terms of whole views, V tensors (B, D)."""
    pairs = pairs_of_views(len(views))
    invariance = torch.stack([F.mse_loss(views[i], views[j]) for i, j in pairs]).mean()
    return invariance, *variance_covariance(torch.stack(views))


def local_terms(
    cells: list[Tensor], centers: list[Tensor], by_features: list[int], by_location: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return invariance, variance and covariance terms of matched cells, averaged over view pairs.

    Args:
        cells: Cells of each view, (B, N, L).
        centers: Their positions in the image, (B, N, 2) in pixels.
        by_features: Number of cells of each view to match by features.
        by_location: Number of cells of each view to match by location.
    """
    groups: dict[tuple[int, int], list[Match]] = defaultdict(list)
    for i, j in pairs_of_views(len(cells)):
        if i > j:
            continue  # both views are large, and their pair counts twice
        for compared, numbers in ((cells, by_features), (centers, by_location)):
            for view, other in ((i, j), (j, i)):
                matches = nearest_cells(compared[view], compared[other], numbers[view])
                count = 2 if j < NUM_LARGE else 1
                groups[matches[0].shape[1], count].append(Match(view, other, *matches))
    total = sum(count * len(matches) for (_, count), matches in groups.items())
    everyone = cells_of_all_ranks(cells)
    terms = [
        torch.stack(matched_terms(cells, everyone, matches)) * (2 * count * len(matches) / total)
        for (_, count), matches in groups.items()
    ]  # sums over features and location, means otherwise
    invariance, variance, covariance = torch.stack(terms).sum(dim=0)
    return invariance, variance, covariance


def cells_of_all_ranks(cells: list[Tensor]) -> list[Tensor] | None:
    """Return the cells of all ranks, (B * W, N, L), or None if they are not needed."""
    if world_size() == 1 or not has_few_images(cells[0].transpose(0, 1)):
        return None
    return [all_gather_cat(view) for view in cells]


@torch.no_grad()
@in_full_precision
def nearest_cells(cells: Tensor, others: Tensor, num_matches: int) -> tuple[Tensor, Tensor]:
    """Match the cells of a view to their nearest neighbors in another; return the best matches.

    Args:
        cells: (B, N, F): features or positions.
        others: (B, N', F), of the other view.
        num_matches: M, or all N cells if there are fewer.

    Returns:
        (B, M) indices of cells in ascending order, and (B, M) indices of their neighbors.
    """
    distance, neighbor = torch.cdist(cells, others).min(dim=2)  # (B, N)
    order = distance.argsort(dim=1, stable=True)[:, :num_matches]
    best = order.sort(dim=1).values
    return best, neighbor.gather(1, best)


def matched_terms(
    cells: list[Tensor], everyone: list[Tensor] | None, matches: list[Match]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return VICReg's terms of matched cells, with separate statistics for each of M matches.

    Args:
        cells: Cells of each view, (B, N, L).
        everyone: Those of all ranks, see ``cells_of_all_ranks``.
        matches: Matches of equal numbers of cells, whose terms are averaged.
    """
    views = [match.view for match in matches] + [match.other for match in matches]
    of_view = [match.cells for match in matches] + [match.neighbors for match in matches]
    indices = torch.stack(of_view, dim=1)  # (B, 2S, M) for S matches
    ours = _take(cells, views, indices)  # (2SM, B, L)
    every = None if everyone is None else _take(everyone, views, all_gather_cat(indices))
    first, second = ours.chunk(2)
    return F.mse_loss(first, second), *variance_covariance(ours, every)


def _take(cells: list[Tensor], views: list[int], indices: Tensor) -> Tensor:
    taken = [gather_tokens(cells[view], indices[:, n]) for n, view in enumerate(views)]
    return torch.cat(taken, dim=1).transpose(0, 1)
