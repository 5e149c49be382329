"""PCA whitening of descriptors, fitted to another set of images.

N descriptors of E features, D dimensions kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from selftask.errors import UserError

_FLOOR = 1e-5  # smallest eigenvalue, relative to the largest


@dataclass(frozen=True)
class Whitening:
    """Affine map that gives the fitted descriptors mean 0 and uncorrelated entries of variance 1.

    The variance of directions below the floor of ``fit`` remains smaller.
    """

    mean: Tensor  # (E,)
    matrix: Tensor  # (E, D)

    @classmethod
    def fit(cls, parts: Iterable[Tensor], dimensions: int | None = None) -> Whitening:
        """Fit the map to descriptors, in float64; descriptors are not stored.

        Eigenvalues are limited to at least 1e-5 of the largest, so that directions without variance
        are not amplified.

        Args:
            parts: Blocks (n, E) of descriptors, N in total.
            dimensions: Number D of directions with the largest variance; None for all, at most N -
                1.

        Raises:
            UserError: If there are fewer than two descriptors, or fewer than D directions.
        """
        count, total, products = 0, torch.zeros(()), torch.zeros(())
        for part in parts:
            rows = part.double()
            count += len(rows)
            total = total + rows.sum(dim=0)
            products = products + rows.T @ rows
        most = min(len(total), count - 1) if count else 0
        if most < 1:
            raise UserError(f"whiten: {count} descriptors are too few to learn a whitening of")
        if dimensions is not None and dimensions > most:
            raise UserError(
                f"whiten_dim={dimensions}: {count} descriptors of {len(total)} features "
                f"have {most} directions; use at most {most}"
            )
        mean = total / count
        covariance = (products - count * mean.outer(mean)) / (count - 1)
        values, vectors = torch.linalg.eigh(covariance)  # ascending
        largest = slice(len(values) - (dimensions or most), None)
        scale = values[largest].clamp(min=_FLOOR * float(values[-1])).rsqrt()
        return cls(mean.float(), (vectors[:, largest] * scale).float().flip(1))

    def __call__(self, rows: Tensor) -> Tensor:
        """Map descriptors (N, E) to (N, D), largest variance first."""
        return (rows - self.mean) @ self.matrix
