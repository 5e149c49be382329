"""Depth from frozen patch features, by classification into bins of depth.

Images of S x S pixels, patches in a grid of h x w, C bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema import Config
from selftask.data.loading.open_data import Sources
from selftask.distributed.accelerator import forked_rng, to_float64
from selftask.errors import UserError
from selftask.evaluate.dense.depth_maps import UNKNOWN, DepthImages
from selftask.evaluate.dense.heads import (
    HeadOptions,
    Scores,
    check_choice,
    fit_heads,
    sample_patches,
)
from selftask.evaluate.dense.masks import IGNORED
from selftask.evaluate.dense.patches import PatchFeatures, limited, square_batches
from selftask.evaluate.on_ranks import in_order
from selftask.logs import get_logger
from selftask.models.eval_mode import in_eval_mode

METRICS = ("rmse", "abs_rel", "delta1")

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class DepthOptions(HeadOptions):
    """Options of the depth evaluation: bins, range and unit of depths."""

    bins: int = setting(256, min=2, max=10_000)
    """Number of bins of equal width."""
    min_depth: float = setting(0.001, min=0)
    """Smallest depth that counts, in the unit of the ``.npy`` files, such as meters."""
    max_depth: float = setting(10.0, above=0)
    """Largest depth that counts, in the same unit."""
    unit: float = setting(0.001, above=0)
    """Depth of a pixel with value 1 in a PNG of 16 bits; 0.001 reads millimeters as meters."""

    def problems(self, config: dict[str, Any] | None = None) -> Iterator[str]:
        yield from super().problems(config)
        if self.min_depth >= self.max_depth:
            yield f"min_depth: {self.min_depth:g}; must be below max_depth={self.max_depth:g}"

    def counts(self, depth: Tensor) -> Tensor:
        """Return a mask of depths that count: known and from ``min_depth`` to ``max_depth``."""
        return (depth > UNKNOWN) & (depth >= self.min_depth) & (depth <= self.max_depth)

    def bin_of(self, depth: Tensor) -> Tensor:
        """Return the bin of each depth, int64 of the same shape; IGNORED outside of the range."""
        share = (depth - self.min_depth) / (self.max_depth - self.min_depth)
        number = (share * self.bins).long().clamp(0, self.bins - 1)
        return torch.where(self.counts(depth), number, IGNORED)

    def centers(self, device: torch.device) -> Tensor:
        """Return the depths in the middle of the bins (C,)."""
        width = (self.max_depth - self.min_depth) / self.bins
        return self.min_depth + width * (torch.arange(self.bins, device=device) + 0.5)


def evaluate_depth(
    backbone: nn.Module,
    config: Config,
    roots: dict[str, str],
    sources: Sources,
    options: DepthOptions,
    *,
    device: torch.device,
    tell: Callable[[str], None] = log.info,
) -> dict[str, float]:
    """Predict the depth of test images from patches of training images with known depth.

    The depth of a patch is the mean of the centers of the bins, weighted by their probabilities, as
    in AdaBins (arXiv:2011.14141), with bins of equal width. These depths are interpolated
    bilinearly to S x S, the size of the resized images and depth maps. Several ranks share the
    images of both sets, and each trains the heads.

    Args:
        backbone: A backbone with patches, see ``models.features``.
        config: Config with the normalization of images and the handling of unreadable ones.
        roots: Folders of ``data`` and ``data.val``, by key.
        sources: Training and test images in them.
        options: Image size, heads and bins.
        device: Device to compute on; the backbone is moved to it.
        tell: Called with a line about images and memory.

    Returns:
        ``depth_linear_rmse``, ``depth_linear_abs_rel``, ``depth_linear_delta1`` (see ``metrics``)
        and the same for ``knn``, over the pixels of an image whose depth counts, averaged over
        test images; ``depth_linear_lr``, ``train_images``, ``test_images``, ``patches`` and
        ``size``.

    Raises:
        UserError: If depth maps are missing or damaged, no depth counts, the backbone has no
            patches of this size, or features are not finite.
    """
    assert sources.val is not None
    size = options.size_of(config)
    patches = PatchFeatures(backbone.to(device), size, options.layer)
    train, test = (
        DepthImages(root, limited(source, options.images, options.seed), key, size, options.unit)
        for (key, root), source in zip(roots.items(), (sources.train, sources.val), strict=True)
    )
    if "linear" in options.heads and len(options.lr) > 1:
        check_choice(len(train))
    centers = options.centers(device)

    def quality(logits: Tensor, shares: Tensor) -> Tensor:
        return -(logits.softmax(dim=1) @ centers - shares @ centers).square().mean()

    with in_eval_mode(backbone), forked_rng(), torch.no_grad():
        features, shares, images = sample_patches(
            patches,
            square_batches(train, config, device, train.key),
            options,
            len(train),
            lambda batch: options.bin_of(batch.extras["depth"]),
            options.bins,
        )
        _check_depths(train.key, len(features) > 0, options)
        heads, facts = fit_heads(options, features, shares, images, quality)
        tell(
            f"{len(train)} training and {len(test)} test images of {size}x{size} pixels; memory: "
            f"{len(features):,} patches of {features.shape[1]} features, "
            f"{features.nbytes / 1e6:,.1f} MB"
        )

        measure = partial(_measure, patches, heads, centers, options)
        tested = list(in_order(measure, square_batches(test, config, device, test.key)))
    row: dict[str, float] = {}
    for name in heads:
        rows = [values for batch in tested for values in batch[name]]
        _check_depths(test.key, any(bool(values.isfinite().all()) for values in rows), options)
        means = torch.stack(rows).nanmean(dim=0).tolist()
        row |= {f"depth_{name}_{m}": v for m, v in zip(METRICS, means, strict=True)}
    row |= {f"depth_{name}": value for name, value in facts.items()}
    row |= {"train_images": len(train), "test_images": len(test)}
    return row | {"patches": len(shares), "size": size}


def _measure(
    patches: PatchFeatures,
    heads: Mapping[str, Scores],
    centers: Tensor,
    options: DepthOptions,
    batch: Batch,
) -> dict[str, list[Tensor]]:
    """Return the metrics (3,) of each image of a batch, by the name of the head."""
    results: dict[str, list[Tensor]] = {name: [] for name in heads}
    depths = batch.extras["depth"].to(centers.device)  # (B, S, S)
    for dense, depth in zip(patches(batch.all_views[0]), depths, strict=True):
        for name, head in heads.items():
            scores = head(dense.flatten(1).T)  # (h * w, C)
            likely = scores.softmax(dim=1) if name == "linear" else scores
            coarse = (likely @ centers).view(1, 1, *dense.shape[1:])
            predicted = F.interpolate(coarse, depth.shape, mode="bilinear")[0, 0]
            results[name].append(metrics(predicted, depth, options.counts(depth)).cpu())
    return results


def _check_depths(key: str, any_counts: bool, options: DepthOptions) -> None:
    """Raise UserError if a set has no depth from ``min_depth`` to ``max_depth``."""
    if not any_counts:
        raise UserError(
            f"{key}: no depth is from min_depth={options.min_depth:g} to "
            f"max_depth={options.max_depth:g}; unit={options.unit:g} is that of PNGs"
        )


def metrics(predicted: Tensor, depth: Tensor, counts: Tensor) -> Tensor:
    """Return RMSE, mean relative error, and the share of pixels within a factor of 1.25: (3,).

    Eigen et al., arXiv:1406.2283, section 4.2. NaN without a pixel that counts. The RMSE has the
    unit of the depths.

    Args:
        predicted: Depths (S, S).
        depth: True depths (S, S).
        counts: True for pixels that count (S, S).
    """
    guess, true = to_float64(predicted[counts]), to_float64(depth[counts])
    error = guess - true
    close = torch.maximum(guess / true, true / guess) < 1.25
    rows = (error.square().mean().sqrt(), (error.abs() / true).mean(), close.to(error).mean())
    return torch.stack(rows)
