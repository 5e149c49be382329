"""Label-free measures of features, from the spectrum of a set of images.

N images, E features. Singular values are those of the (N, E) features, eigenvalues those of their
covariance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.evaluate.features import Features, FileFeatures, FileRows, in_blocks
from selftask.registry import register_evaluation

_EPS = 1e-7  # RankMe, eq. 1
_ZERO = 1e-13  # smaller eigenvalues, relative to the largest, are rounding errors
_COMPARED = 4096  # first images, of whose pairs the uniformity is


@register_evaluation("spectrum")
@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """RankMe, alpha-ReQ, NESum and uniformity of the features of the test images.

    No labels are needed. Compare checkpoints of one method only: the measures depend on the width
    of the features and on the images. NESum (He and Ozay, ICML 2022) is the sum of the eigenvalues
    divided by the largest. The uniformity is that of the first 4096 images.
    """

    needs_labels: ClassVar[bool] = False
    takes_files: ClassVar[bool] = True

    first: int = setting(3, min=1)
    """Rank of the first eigenvalue that ``alpha`` is fitted to; the largest has rank 1."""
    last: int = setting(100, min=2)
    """Rank of the last eigenvalue of the fit; eigenvalues of 0 are excluded."""

    def problems(self, config: dict[str, Any] | None = None) -> Iterator[str]:
        if self.last <= self.first:
            yield f"last: {self.last}; more than first={self.first} is expected"

    def __call__(
        self, train: Features | FileFeatures, test: Features | FileFeatures
    ) -> dict[str, float]:
        """Return ``rankme``, ``alpha``, ``nesum`` and ``feature_uniformity`` of the test images.

        The training images are not used.

        Raises:
            UserError: If there are too few images or features, or features are not finite.
        """
        test.check_finite()
        features = test.features
        if min(features.shape) <= self.first:
            raise UserError(
                f"spectrum: {len(test)} images of {features.shape[1]} features have too few "
                f"eigenvalues for a fit from number {self.first} on; give more images"
            )
        mean = torch.stack([rows.double().sum(dim=0) for rows in in_blocks(features)]).sum(dim=0)
        variances = _eigenvalues(features, mean / len(test))
        return {
            "rankme": rankme(features),
            "alpha": alpha(variances, self.first, self.last),
            "nesum": float(variances.sum() / variances[0].clamp(min=1e-300)),
            "feature_uniformity": uniformity(features[:_COMPARED].double()),
        }


def rankme(features: Tensor | FileRows) -> float:
    """Return the exponential of the entropy of the singular values of features (N, E).

    Garrido et al., RankMe, ICML 2023, arXiv:2210.02885, eq. 1. The features are not centered.
    """
    singular = _eigenvalues(features).sqrt()
    share = singular / singular.sum().clamp(min=1e-300) + _EPS
    return float(torch.exp(-(share * share.log()).sum()))


def alpha(variances: Tensor, first: int, last: int) -> float:
    """Return the exponent of the decay of the eigenvalues of the covariance, alpha-ReQ.

    Agrawal et al., alpha-ReQ, NeurIPS 2022: minus the slope of log eigenvalue over log rank, by
    least squares with weights 1 / rank, as in Stringer et al., Nature 2019. Values near 1 are best.

    Args:
        variances: Eigenvalues (E,), descending.
        first: Rank of the first eigenvalue of the fit, from 1.
        last: Rank of the last eigenvalue of the fit; eigenvalues of 0, as of constant features, are
            excluded.
    """
    chosen = variances[first - 1 : last]
    chosen = chosen[chosen > _ZERO * variances[0]]
    rank = torch.arange(first, first + len(chosen), dtype=chosen.dtype, device=chosen.device)
    x, y, weight = rank.log(), chosen.log(), 1 / rank
    x = x - (weight * x).sum() / weight.sum()
    return float(-(weight * x * y).sum() / (weight * x.square()).sum().clamp(min=1e-300))


def uniformity(features: Tensor) -> float:
    """Return log E exp(-2 |x - y|^2) over pairs of different images, as unit vectors.

    Wang and Isola, ICML 2020, arXiv:2005.10242, eq. 3. Lower is more uniform; 0 is collapsed.
    Features of 0 remain 0, so that those of a network without any output are equal.

    Args:
        features: (N, E), not necessarily normalized; N is at least 2.
    """
    units = F.normalize(features, dim=1)
    length = units.square().sum(dim=1)  # 1 or 0
    kernel = torch.exp(4 * (units @ units.T) - 2 * (length[:, None] + length))
    count = len(units)
    return float(((kernel.sum() - kernel.diagonal().sum()) / (count * (count - 1))).log())


def _eigenvalues(features: Tensor | FileRows, mean: Tensor | float = 0.0) -> Tensor:
    """Return the min(N, E) largest eigenvalues of ``x.T @ x``, descending, float64.

    Args:
        features: (N, E); x are these minus ``mean``, in double precision.
        mean: (E,), or 0.
    """
    if len(features) < features.shape[1]:
        rows = features[:].double() - mean
        gram = rows @ rows.T
    else:
        gram = torch.zeros((), dtype=torch.float64)
        for block in in_blocks(features):
            rows = block.double() - mean
            gram = gram + rows.T @ rows
    return torch.linalg.eigvalsh(gram).flip(0).clamp(min=0)
