"""Vector quantization on the unit sphere: VQ-KD of BEiT v2 (arXiv:2208.06366, section 3.1).

D: width of a code; K: number of codes; n: rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.models.precision import in_full_precision


class VectorQuantizer(nn.Module):
    """A codebook of unit vectors, each of which follows the vectors assigned to it.

    Args:
        num_codes: Number of codes, K.
        dim: Width of a code, D.
    """

    codebook: Tensor
    """(K, D), unit vectors."""
    usage: Tensor
    """(K,), moving average of the number of vectors of each code in a step."""

    def __init__(self, num_codes: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("codebook", F.normalize(torch.randn(num_codes, dim), dim=1))
        self.register_buffer("usage", torch.zeros(num_codes))

    @in_full_precision
    def scores(self, units: Tensor) -> Tensor:
        """Return the cosines of unit vectors (..., D) with all codes, (..., K)."""
        return units @ self.codebook.to(units.dtype).T

    @torch.no_grad()
    def forward(self, units: Tensor) -> Tensor:
        """Return the index (...) of the nearest code for unit vectors (..., D)."""
        return self.scores(units).argmax(dim=-1)

    @torch.no_grad()
    def update(self, sums: Tensor, counts: Tensor, *, momentum: float) -> None:
        """Move each code towards the mean of its vectors; codes without vectors are unchanged.

        Args:
            sums: Sum of the unit vectors of each code, over all ranks, (K, D).
            counts: Number of vectors of each code, (K,).
            momentum: Weight of the old codebook, in [0, 1].
        """
        means = F.normalize(sums.to(self.codebook.dtype), dim=1)
        means = torch.where(counts[:, None] > 0, means, self.codebook)
        self.codebook.copy_(F.normalize(self.codebook.lerp(means, 1 - momentum), dim=1))
        self.usage.lerp_(counts.to(self.usage.dtype), 1 - momentum)


def code_sums(units: Tensor, codes: Tensor, num_codes: int) -> tuple[Tensor, Tensor]:
    """Return the sum of the vectors of each code (K, D), and their number (K,).

    Sums are matrix products, whose order of summation is fixed, so that ranks and runs agree; that
    of ``index_add_`` on a GPU is not.

    Args:
        units: (n, D).
        codes: (n,) int64.
        num_codes: Number of codes, K.
    """
    sums = units.new_zeros(num_codes, units.shape[1])
    counts = units.new_zeros(num_codes)
    every = torch.arange(num_codes, device=codes.device)
    for rows, members in zip(units.split(16_384), codes.split(16_384), strict=True):
        chosen = (members[:, None] == every).to(rows.dtype)  # one_hot would be of int64
        sums += chosen.T @ rows
        counts += chosen.sum(dim=0)
    return sums, counts
