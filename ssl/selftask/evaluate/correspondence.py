"""Correspondence of patches between two views of an image under a known warp, without labels.

B images of S x S pixels, N patches of each in a grid of h x w, E features. Positions are x and y
from the upper left corner, as shares of the side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema import Config
from selftask.data.loading.open_data import Sources
from selftask.distributed.accelerator import forked_rng
from selftask.evaluate.dense.patches import (
    PatchFeatures,
    PatchOptions,
    Squared,
    limited,
    square_batches,
)
from selftask.evaluate.on_ranks import in_order
from selftask.logs import get_logger
from selftask.models.eval_mode import in_eval_mode
from selftask.models.features.tokens import Grid
from selftask.random.views import draw_rng
from selftask.registry import register_evaluation

_DETAIL = 2  # the warped view is cut out of an image of this many times its size

log = get_logger(__name__)


@register_evaluation("correspondence")
@dataclass(frozen=True, kw_only=True)
class Correspondence(PatchOptions):
    """Share of patches that are found in a warped view, without labels: correspondence_pck_0.1."""

    needs_labels: ClassVar[bool] = False
    takes_backbone: ClassVar[bool] = True

    images: int = setting(500, min=1)
    """Maximum number of images, chosen at random."""
    scale: tuple[float, float] = setting((0.5, 1.0), above=0, max=1, rising=True)
    """Range of the side of the second view, relative to the largest possible side at its angle."""
    degrees: float = setting(30.0, min=0, max=180)
    """Largest rotation of the second view in either direction, in degrees."""
    flip: float = setting(0.5, min=0, max=1)
    """Probability that the second view is mirrored."""
    thresholds: list[float] = setting([0.05, 0.1, 0.2], above=0, below=1, nonempty=True)
    """Distances within which a match is correct, as shares of the side of the image."""
    seed: int = setting(0, min=0)
    """Seed of the choice of images and of the warps."""

    def __call__(
        self, backbone: nn.Module, config: Config, sources: Sources, device: torch.device
    ) -> dict[str, float]:
        """Return the metrics of the images of ``data.val`` or, without it, of ``data``.

        Raises:
            UserError: As ``evaluate_correspondence``.
        """
        row = evaluate_correspondence(backbone, config, sources, self, device=device)
        return {name: row[name] for name in row if name.startswith("correspondence_")}


def evaluate_correspondence(
    backbone: nn.Module,
    config: Config,
    sources: Sources,
    options: Correspondence,
    *,
    device: torch.device,
    tell: Callable[[str], None] = log.info,
) -> dict[str, float]:
    """Match the patches of a warped view of each image to those of the whole image.

    The match of a patch is the patch of the whole image with the largest cosine. It is correct if
    its center is within a threshold of the true position, or if no other center is closer to it.
    Several ranks share the images.

    Args:
        backbone: A backbone with patches, see ``models.features``.
        config: Config with the normalization of images and the handling of unreadable ones.
        sources: The images: those of ``val``, or of ``train`` if ``val`` is None.
        options: Image size, warps and thresholds.
        device: Device to compute on; the backbone is moved to it.
        tell: Called with a line about images and patches.

    Returns:
        Means over images: for each threshold the share of correct matches, such as
        ``correspondence_pck_0.1``, and the share expected for random matches, such as
        ``correspondence_chance_0.1``; ``correspondence_distance``, the distance of a match from its
        true position as a share of the side. Also ``test_images`` and ``size``, S.

    Raises:
        UserError: If the backbone has no patches of this size, or features are not finite.
    """
    size = options.size_of(config)
    patches = PatchFeatures(backbone.to(device), size, options.layer)
    source, key = (sources.train, "data") if sources.val is None else (sources.val, "data.val")
    chosen = limited(source, options.images, options.seed)

    def match(batch: Batch) -> tuple[Tensor, Grid]:
        images = batch.all_views[0]  # (B, C, 2 S, 2 S)
        warps = torch.stack([draw_warp(options, n) for n in batch.index.tolist()]).to(images)
        first = patches(resized(images, size))
        second = patches(warped(images, warps, size))
        triples = zip(first, second, warps, strict=True)
        scores = [_scores(*triple, options.thresholds) for triple in triples]
        return torch.stack(scores), (first.shape[2], first.shape[3])

    with in_eval_mode(backbone), forked_rng(), torch.no_grad():
        batches = square_batches(Squared(chosen, _DETAIL * size), config, device, key)
        parts, grids = zip(*in_order(match, batches), strict=True)
    results = torch.cat(parts)
    grid = grids[0]
    tell(
        f"{len(results)} images of {size}x{size} pixels, each warped once; "
        f"{grid[0]}x{grid[1]} patches"
    )
    names = [f"{n}_{t:g}" for n in ("pck", "chance") for t in options.thresholds]
    means = results.mean(dim=0).tolist()
    row = {
        f"correspondence_{name}": value
        for name, value in zip([*names, "distance"], means, strict=True)
    }
    return {**row, "test_images": len(results), "size": size}


def draw_warp(options: Correspondence, index: int) -> Tensor:
    """Draw the affine map (2, 3) from (x, y) in the second view to (x, y) in the whole image.

    Both are in [0, 1]. The second view is a square inside the image, scaled, rotated and possibly
    mirrored. The draws depend on the options and the number of the image only.

    Args:
        options: Ranges of the draws.
        index: Number of the image among those chosen.
    """
    scale, angle, mirror, x, y = draw_rng(options.seed, 0, index, 0).random(5).tolist()
    low, high = options.scale
    reach = low + (high - low) * scale  # width and height of the rotated square
    radians = math.radians(options.degrees * (2 * angle - 1))
    cos, sin = math.cos(radians), math.sin(radians)
    side = reach / (abs(cos) + abs(sin))
    sign = -1.0 if mirror < options.flip else 1.0
    turn = np.array([[cos * sign, -sin], [sin * sign, cos]]) * side
    center = reach / 2 + (1 - reach) * np.array([x, y])
    return torch.from_numpy(np.column_stack([turn, center - turn.sum(axis=1) / 2]))


def resized(images: Tensor, size: int) -> Tensor:
    """Resize images (B, C, H, W) to S x S pixels, antialiased."""
    return F.interpolate(images, (size, size), mode="bilinear", align_corners=False, antialias=True)


def warped(images: Tensor, warps: Tensor, size: int) -> Tensor:
    """Return the second view (B, C, S, S) of each image.

    Args:
        images: (B, C, H, W).
        warps: Results of ``draw_warp``, (B, 2, 3).
        size: Height and width of the views in pixels, S.
    """
    linear, shift = warps[..., :2], warps[..., 2:]
    shift = 2 * shift + linear.sum(dim=2, keepdim=True) - 1  # torch's positions are in [-1, 1]
    grid = F.affine_grid(
        torch.cat([linear, shift], dim=2), [*images.shape[:2], size, size], align_corners=False
    )
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def centers(grid: Grid, like: Tensor) -> Tensor:
    """Return x and y of the centers of patches, (N, 2), row by row.

    Args:
        grid: Rows and columns of patches.
        like: Tensor whose dtype and device the result gets.
    """
    rows, columns = (
        (torch.arange(n, dtype=like.dtype, device=like.device) + 0.5) / n for n in grid
    )
    return torch.stack([columns.repeat(grid[0]), rows.repeat_interleave(grid[1])], dim=1)


def distances(image: Tensor, view: Tensor, warp: Tensor) -> tuple[Tensor, Tensor]:
    """Return distances of true positions to patch centers, and the match of each patch.

    Args:
        image: Patch features of the whole image (E, h, w).
        view: Patch features of the second view (E, h, w).
        warp: Map (2, 3) from positions in the view to those in the image.

    Returns:
        Distances (N, N) of the true position of each patch of the view to the center of each patch
        of the image; the match (N,) of each patch of the view: the patch of the image with the
        largest cosine.
    """
    positions = centers((image.shape[1], image.shape[2]), warp)  # (N, 2)
    true_positions = positions @ warp[:, :2].T + warp[:, 2]
    units = [F.normalize(maps.flatten(1).T, dim=1) for maps in (view, image)]  # (N, E)
    return torch.cdist(true_positions, positions), (units[0] @ units[1].T).argmax(dim=1)


def _scores(image: Tensor, view: Tensor, warp: Tensor, thresholds: list[float]) -> Tensor:
    """Return the shares of correct and of random matches, and the mean distance of a match.

    The result is (2 T + 1,) for T thresholds: T shares of each kind, then the distance.
    """
    distance, match = distances(image, view, warp)
    nearest = distance.amin(dim=1, keepdim=True)
    correct = [(distance <= torch.clamp(nearest + 1e-6, min=t)).float() for t in thresholds]
    matched = [part.gather(1, match[:, None]) for part in (*correct, distance)]
    shares = [part.mean() for part in (*matched[:-1], *correct, matched[-1])]
    return torch.stack(shares).cpu().double()
