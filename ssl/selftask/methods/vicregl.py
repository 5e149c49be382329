"""VICRegL: VICReg of whole views, and of cells matched by location and by features.

V: views, the first two of which are large; B: images per rank; W: ranks; N: cells of a view's
feature map; M: matched cells; S: pairs of views in a group; D: width of the projector, L: width of
the local projector.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import all_gather_cat, world_size
from selftask.methods.base import Method, Task
from selftask.models.build import embed_dim
from selftask.models.heads import mlp
from selftask.models.losses.image_products import has_few_images
from selftask.models.losses.variance_covariance import variance_covariance, variances_covariances
from selftask.models.network import Network, PatchOutput
from selftask.models.precision import in_full_precision, to_float32
from selftask.registry import register_method

NUM_LARGE = 2  # views, each compared with all others


@register_method("vicregl")
class VICRegL(Method):
    """VICRegL (arXiv:2210.01571): VICReg of whole views and of matching cells.

    Loss: ``alpha VICReg(images) + (1 - alpha) VICReg(matched cells)`` (eq. 5).

    Use it in place of ``vicreg`` to pretrain for segmentation.

    Differs from the authors' code:

    * By location, 20 cells of each large view and 4 of each small one are matched; in the authors'
      code, 20 of the first view of a pair and 4 of the second, regardless of their sizes.
    * Positions of cells take flips into account; in the authors' code flips are ignored
      (``--no-flip-grid 1``).
    * The standard deviation of red is 0.229; in the authors' code, 0.228.
    * The local loss is the mean over all pairs of views, as in the authors' code since d14c226 of
      December 2022. Their option for a lower learning rate of the local projector
      (``--maps-lr-ratio``) has no effect and is not implemented.
    * ConvNeXt has a layer scale that stays 1 instead of none, so that the weights fit timm's model.
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
        """Norm between the projectors' layers. batch: BatchNorm; layer: LayerNorm, which the
        published code has with a ConvNeXt.
        """
        alpha: float = setting(0.75, min=0, max=1)
        """Weight of the loss of whole views; cells get 1 - alpha."""
        num_matches: int = setting(20, min=1, tiny=2)
        """Number of cells of a large view that are matched, those with the nearest match, gamma."""
        num_small_matches: int = setting(4, min=1, tiny=2)
        """Number of cells of each other view that are matched."""
        match_all_features: bool = True
        """Whether all cells are matched by features; false: as many as by location."""
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
        """Compute ``batch["centers"]``: of each view, the positions of its cells in the image.

        They are x and y in pixels, (B, N, 2) for each view.
        """
        batch = task.last_batch
        draws = [draw for group in batch.draws.values() for draw in group]
        maps = batch.output.prediction["cells"]  # (B, L, h, w) for each view
        batch["centers"] = [  # (B, N, 2) each
            draw.centers(*cells.shape[2:]) for draw, cells in zip(draws, maps, strict=True)
        ]

    def forward(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the weighted terms of eq. 5.

        ``output.prediction`` has, for each view, ``pooled`` (B, D) and ``cells`` (B, L, h, w).
        """
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


Views = tuple[int, ...]  # indices of views


class Match(NamedTuple):
    """M cells of each of S views, and their nearest neighbors in S other views, as indices."""

    views: Views
    others: Views
    cells: Tensor
    """(B, S, M), indices."""
    neighbors: Tensor
    """(B, S, M), indices of the other views' cells."""

    @property
    def rows(self) -> int:
        """S * M, the number of pairs of cells of an image."""
        return self.cells[0].numel()


class LocalNetwork(Network):
    """Network that returns ``pooled`` (B, D) and ``cells`` (B, L, h, w) of each view.

    Each view has its own pass. ``features`` of the output is a list, with an item per view.
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
    """Return invariance, variance and covariance terms of whole views.

    Args:
        views: V tensors (B, D).
    """
    every = torch.stack(views)  # (V, B, D)
    shape = (NUM_LARGE, *every.shape)
    both = every[:NUM_LARGE, None].expand(shape), every.expand(shape)
    invariance = F.mse_loss(*both) * len(views) / (len(views) - 1)  # a view equals itself
    return invariance, *variance_covariance(every)


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
    pairs = alike_pairs(cells)
    of_views, of_centers = stacked(cells, pairs), stacked(centers, pairs)
    matches, counts = [], []
    for views, others in pairs:
        for compared, numbers in ((of_views, by_features), (of_centers, by_location)):
            num_matches = numbers[views[0]], numbers[others[0]]
            there, back = nearest_cells(compared[views], compared[others], *num_matches)
            matches += [Match(views, others, *there), Match(others, views, *back)]
        count = 2 if others[0] < NUM_LARGE else 1  # a pair of large views is compared twice
        counts += [count * len(views)] * 4
    everyone = cells_of_all_ranks(cells)
    of_all = None if everyone is None else stacked(everyone, pairs)
    terms = matched_terms(of_views, of_all, matches).split([m.rows for m in matches], dim=1)
    # sums over features and location, means otherwise
    shares = [2 * count / sum(counts) for count in counts]
    weighted = [values.mean(dim=1) * share for values, share in zip(terms, shares, strict=True)]
    invariance, variance, covariance = torch.stack(weighted).sum(dim=0)
    return invariance, variance, covariance


def alike_pairs(cells: list[Tensor]) -> list[tuple[Views, Views]]:
    """Group the pairs of views (i, j) with i < j by their numbers of cells.

    Pairs of two large views are in separate groups.

    Returns:
        For each group, the views i and the views j.
    """
    groups: dict[tuple[int, int, bool], list[tuple[int, int]]] = defaultdict(list)
    for i, j in pairs_of_views(len(cells)):
        if i < j:
            groups[cells[i].shape[1], cells[j].shape[1], j < NUM_LARGE].append((i, j))
    return [(tuple(i for i, _ in g), tuple(j for _, j in g)) for g in groups.values()]


def stacked(of_views: list[Tensor], pairs: list[tuple[Views, Views]]) -> dict[Views, Tensor]:
    """Stack the tensors of the views of each group of S pairs: (B, N, F) each -> (B, S, N, F).

    Args:
        of_views: Features or positions of the cells of each view.
        pairs: Groups of pairs, from ``alike_pairs``.

    Returns:
        A tensor for the views i, and one for the views j, of each group, by these views.
    """
    sides = {side for pair in pairs for side in pair}
    return {side: torch.stack([of_views[view] for view in side], dim=1) for side in sides}


def cells_of_all_ranks(cells: list[Tensor]) -> list[Tensor] | None:
    """Return the cells of all ranks, (B * W, N, L), or None if they are not needed."""
    if world_size() == 1 or not has_few_images(cells[0].transpose(0, 1)):
        return None
    return [all_gather_cat(view) for view in cells]


@torch.no_grad()
@in_full_precision
def nearest_cells(
    first: Tensor, second: Tensor, num_first: int, num_second: int
) -> list[tuple[Tensor, Tensor]]:
    """Match cells to their nearest neighbors in other views, both ways; return the best matches.

    Args:
        first: (..., N, F): features or positions of the cells of a view.
        second: (..., N', F), of another view.
        num_first: M, number of best matches of cells of the first view, or all N if it has fewer.
        num_second: M', for cells of the second view.

    Returns:
        (..., M) indices of cells of the first view in ascending order, and (..., M) indices of
        their neighbors in the second; then the same of the second view, (..., M').
    """
    distance = torch.cdist(first, second)
    return [_best(distance, num_first), _best(distance.mT, num_second)]


def _best(distance: Tensor, num_matches: int) -> tuple[Tensor, Tensor]:
    nearest, neighbor = distance.min(dim=-1)
    num_cells = nearest.shape[-1]
    if num_matches >= num_cells:
        return torch.arange(num_cells, device=distance.device).expand_as(neighbor), neighbor
    order = nearest.argsort(dim=-1, stable=True)[..., :num_matches]
    best = order.sort(dim=-1).values
    return best, neighbor.gather(-1, best)


def matched_terms(
    cells: dict[Views, Tensor], everyone: dict[Views, Tensor] | None, matches: list[Match]
) -> Tensor:
    """Return VICReg's terms of matched cells, with separate statistics for each pair of cells.

    Args:
        cells: Cells (B, S, N, L) of each group of S views; see ``stacked``.
        everyone: Cells of all ranks, (B * W, S, N, L), or None; see ``cells_of_all_ranks``.
        matches: Matches between two groups of views each.

    Returns:
        Invariance, variance and covariance terms (3, R), where R is the sum of all ``Match.rows``.
    """
    sides = [match.views for match in matches] + [match.others for match in matches]
    of_sides = [match.cells for match in matches] + [match.neighbors for match in matches]
    ours = _take(cells, sides, of_sides)  # (2R, B, L)
    every = None
    if everyone is not None:
        flat = all_gather_cat(torch.cat([index.flatten(1) for index in of_sides], dim=1))
        parts = flat.split([index[0].numel() for index in of_sides], dim=1)
        gathered = [x.view(-1, *index.shape[1:]) for x, index in zip(parts, of_sides, strict=True)]
        every = _take(everyone, sides, gathered)
    first, second = ours.chunk(2)
    invariance = (first - second).square().mean(dim=(1, 2))
    variance, covariance = (
        values.unflatten(0, (2, -1)).mean(dim=0) for values in variances_covariances(ours, every)
    )
    return torch.stack([invariance, variance, covariance])


def _take(cells: dict[Views, Tensor], sides: list[Views], indices: list[Tensor]) -> Tensor:
    """Return the cells at ``indices``, (B, S, M) for each side, as one tensor (rows, B, L)."""
    taken = [
        cells[side].gather(2, index[..., None].expand(*index.shape, cells[side].shape[3]))
        for side, index in zip(sides, indices, strict=True)
    ]
    return torch.cat([x.flatten(1, 2) for x in taken], dim=1).transpose(0, 1)
