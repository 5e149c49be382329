"""Image descriptors at several scales: pooled output, or mean, GeM or R-MAC of a feature map.

A feature map is (E, h, w); a descriptor has E features and length 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.evaluate.features import TOO_LARGE, are_finite
from selftask.evaluate.retrieval.whitening import Whitening
from selftask.models.features.averaged_views import multiple_of, resized_views
from selftask.models.features.extract import adapter_of, extract, fixed_size, interpolates, pooled

_OVERLAP = 0.4  # target overlap of neighboring regions on the first level
_MOST = 7  # maximum number of regions along the longer side on the first level


@dataclass(frozen=True, kw_only=True)
class DescriptorOptions:
    """Options of image descriptors."""

    pool: Literal["pooled", "mean", "gem", "rmac"] = "pooled"
    """Pooled output of the backbone, or a pooling of its last feature map: mean, generalized mean
    or R-MAC.
    """
    p: float = setting(3.0, above=0)
    """Exponent of ``gem``: 1 is the mean, large values approach the maximum."""
    levels: int = setting(3, min=1)
    """Number of region sizes of ``rmac``."""
    side: int = setting(1024, min=1)
    """Longest side in pixels; larger images are resized to it, and smaller ones keep their size,
    rounded to multiples of the patch size.
    """
    scales: list[float] = setting([1.0], above=0, nonempty=True)
    """Image sizes relative to ``side``, whose descriptors are averaged, such as ``[1, 0.7071,
    0.5]``.
    """
    flip: bool = False
    """Whether the descriptors of the mirror images are averaged as well."""


class Descriptors:
    """Image descriptors from a frozen backbone, for one image of any size at a time.

    Args:
        backbone: Images (1, C, H, W) -> features (1, E), in eval mode.
        options: Pooling and sizes.
        device: Device of the backbone.

    Raises:
        UserError: If the backbone has no map to pool, or accepts one image size only.
    """

    def __init__(
        self, backbone: nn.Module, options: DescriptorOptions, device: torch.device
    ) -> None:
        self.backbone, self.options, self.device = backbone, options, device
        self.whitening: Whitening | None = None
        self.multiple = multiple_of(backbone)
        only = fixed_size(backbone)
        if not interpolates(backbone) and only is not None:
            raise UserError(
                f"retrieval: a {type(backbone).__name__} takes images of {only[0]}x{only[1]} "
                "pixels only, and these have any size; use a network that takes others, such as a "
                "ResNet or timm's vit_*"
            )
        if options.pool != "pooled":
            adapter_of(backbone)

    @torch.no_grad()
    def vectors(self, images: Tensor) -> list[Tensor]:
        """Return unit vectors (R, E), on the CPU, for each scale and flip of an image (1, C, H, W).

        R is 1, or with ``rmac`` the number of regions.

        Raises:
            UserError: If features are not finite or too large.
        """
        options = self.options
        views = resized_views(images, options.scales, self.multiple, flip=options.flip)
        return [self._of_view(view) for view in views]

    def combine(self, vectors: Sequence[Tensor]) -> Tensor:
        """Combine the result of ``vectors`` into a descriptor (E,), or (D,) if whitened.

        Regions are whitened one by one and then summed, as in R-MAC; other descriptors are
        whitened after the scales have been averaged.
        """
        whiten: Any = self.whitening or nn.Identity()
        if self.options.pool == "rmac":
            sums = [unit(unit(whiten(rows)).sum(dim=0)) for rows in vectors]
            return unit(torch.stack(sums).mean(dim=0))
        return unit(whiten(unit(torch.cat(list(vectors)).mean(dim=0, keepdim=True))))[0]

    def to_whiten(self, vectors: Sequence[Tensor]) -> Tensor:
        """Return the vectors of an image that the whitening is fitted to.

        With ``rmac`` these are the vectors of all regions and scales; otherwise their mean, scaled
        to unit length.

        Args:
            vectors: Result of ``vectors``.

        Returns:
            (n, E).
        """
        if self.options.pool == "rmac":
            return torch.cat(list(vectors))
        return unit(torch.cat(list(vectors)).mean(dim=0, keepdim=True))

    def _of_view(self, images: Tensor) -> Tensor:
        if self.options.pool == "pooled":
            rows = pooled(self.backbone, images).float()
        else:
            (dense,) = extract(self.backbone, images).tokens.map.float()  # (E, h, w)
            rows = self._pool(dense)
        if not are_finite(rows).all():
            raise UserError(
                f"the features are not finite, or {TOO_LARGE}: the weights are damaged or training "
                "has diverged"
            )
        return unit(rows).cpu()

    def _pool(self, dense: Tensor) -> Tensor:
        if self.options.pool == "rmac":
            return rmac(dense, self.options.levels)
        if self.options.pool == "gem":
            return gem(dense, self.options.p)[None]
        return dense.mean(dim=(1, 2))[None]


def unit(rows: Tensor) -> Tensor:
    """Return rows (N, E) scaled to length 1."""
    return F.normalize(rows, dim=-1)


def gem(dense: Tensor, p: float) -> Tensor:
    """Return the generalized mean (E,) of the positive part of a map (E, h, w).

    Radenovic et al. (arXiv:1711.02512), eq. 3: (mean of x^p)^(1/p). Values are first divided by the
    maximum, so that no power overflows.
    """
    positive = dense.flatten(1).clamp(min=1e-6)
    largest = positive.amax(dim=1, keepdim=True)
    mean = ((positive / largest) ** p).mean(dim=1)
    return largest[:, 0] * mean ** (1 / p)


def rmac(dense: Tensor, levels: int) -> Tensor:
    """Return the maxima (R, E) of a map (E, h, w) over the regions of ``regions``."""
    areas = regions(dense.shape[1], dense.shape[2], levels)
    maxima = [dense[:, y : y + side, x : x + side].amax(dim=(1, 2)) for y, x, side in areas]
    return torch.stack(maxima)


def regions(height: int, width: int, levels: int) -> list[tuple[int, int, int]]:
    """Return the square regions of R-MAC.

    Tolias et al. (arXiv:1511.05879), section 3: level l has l regions along the shorter side and
    l + m - 1 along the longer side, uniformly spread. Their side is 2 * shorter / (l + 1). m is 1
    for a square map. Otherwise it is the number from 2 to 7 for which the overlap of regions on
    level 1 is closest to 40 %. Levels whose regions would be smaller than one cell are skipped.

    Args:
        height: Height of the map, in cells.
        width: Width of the map, in cells.
        levels: Number of levels.

    Returns:
        Row and column of the top left corner, and side, of each region.
    """
    shorter, longer = min(height, width), max(height, width)
    extra = 0
    if longer > shorter:
        overlaps = [1 - (longer - shorter) / (shorter * (m - 1)) for m in range(2, _MOST + 1)]
        extra = 1 + min(range(len(overlaps)), key=lambda n: abs(overlaps[n] - _OVERLAP))
    squares = []
    for level in range(1, levels + 1):
        side = 2 * shorter // (level + 1)
        if side == 0:
            break
        rows, columns = (
            _starts(length, side, level + (extra if length > shorter else 0))
            for length in (height, width)
        )
        squares += [(y, x, side) for y in rows for x in columns]
    return squares


def _starts(length: int, side: int, count: int) -> list[int]:
    """Return the start positions of ``count`` uniformly spread windows."""
    if count == 1:
        return [(length - side) // 2]
    return [number * (length - side) // (count - 1) for number in range(count)]
