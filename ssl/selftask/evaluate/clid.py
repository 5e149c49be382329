"""Label-free measures of clusters and neighbors: the two parts of CLID.

N images, K clusters, E features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.evaluate.clusters import KMeans
from selftask.evaluate.features import Features
from selftask.evaluate.nearest import QUERIES, Bank
from selftask.registry import register_evaluation

_FEWEST = 10  # images; of fewer, no neighbor distances remain to fit
_KEPT = 0.9  # share of the images in the fit, TwoNN


@register_evaluation("clid")
@dataclass(frozen=True, kw_only=True)
class CLID(KMeans):
    """Cluster learnability and intrinsic dimension of the test images, without labels.

    Lu et al., arXiv:2206.01251. In the paper CLID is the sum of the two measures, each standardized
    over the compared models, so it is not defined for a single model. Neighbors and distances are
    those of unit vectors.
    """

    needs_labels: ClassVar[bool] = False

    images: int = setting(5000, min=_FEWEST)
    """Maximum number of images, chosen at random; time grows with its square."""
    k: int | None = setting(None, min=2)
    """Number of clusters; null: the square root of the number of images, rounded down."""
    seed: int = setting(0, min=0)
    """Seed of the choice of images and of the initial centers."""

    def __call__(self, train: Features, test: Features) -> dict[str, float]:
        """Return ``cluster_learnability`` (0 to 1) and ``intrinsic_dimension`` of the test images.

        The training images are not used.

        Raises:
            UserError: If there are too few images, or features are not finite.
        """
        test.check_finite()
        count = min(self.images, len(test))
        k = self.k or math.isqrt(count)
        if count < max(k, _FEWEST):
            raise UserError(
                f"clid: {max(k, _FEWEST)} or more images are expected, and there are {count}"
            )
        order = torch.randperm(len(test), generator=torch.Generator().manual_seed(self.seed))
        units = F.normalize(test.features[order[:count].to(test.features.device)].double(), dim=1)
        distances, neighbors = two_nearest(units)
        cluster = self.clusters_of(units, k)
        is_learned = cluster[neighbors[:, 0]] == cluster
        return {
            "cluster_learnability": float(is_learned.double().mean()),
            "intrinsic_dimension": intrinsic_dimension(distances),
        }


def two_nearest(units: Tensor) -> tuple[Tensor, Tensor]:
    """Return distances and row numbers (N, 2) of the two nearest other rows, nearest first.

    Args:
        units: Unit vectors (N, E).
    """
    bank = Bank(units)
    blocks = torch.arange(len(units), device=units.device).split(QUERIES)
    rows = torch.cat([bank.nearest(units[block], 2, block)[1] for block in blocks])
    distances = (units[:, None] - units[rows]).norm(dim=2)  # exact for close pairs
    distances, order = distances.sort(dim=1)
    return distances, rows.gather(1, order)


def intrinsic_dimension(distances: Tensor) -> float:
    """Return the intrinsic dimension by TwoNN; 0 if all images have equal features.

    Facco et al., Scientific Reports 2017, arXiv:1803.06992: the slope, through the origin, of
    -log(1 - F) over log mu, where mu is the ratio of the two distances and F its empirical
    distribution. The largest 10 % of the ratios and images with a duplicate are excluded.

    Args:
        distances: Distances (N, 2) to the nearest and to the second nearest other image.
    """
    near, far = distances[distances[:, 0] > 0].double().unbind(dim=1)
    x = (far / near).log().sort().values  # (n,)
    share = torch.arange(1, len(x) + 1, dtype=x.dtype, device=x.device) / max(1, len(x))
    kept = int(_KEPT * len(x))
    x, y = x[:kept], -torch.log1p(-share[:kept])
    return float((x * y).sum() / x.square().sum().clamp(min=1e-300))
