"""Vector quantization on the unit sphere: VQ-KD of BEiT v2 (arXiv:2208.06366, section 3.1).

D: width of a code; K: number of codes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.models.precision import in_full_precision


class VectorQuantizer(nn.Module):
    """A codebook of unit vectors, each a moving average of the vectors assigned to it.

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
        """Return the index, int64 (...), of the nearest code for unit vectors (..., D)."""
        return self.scores(units).argmax(dim=-1)

    @torch.no_grad()
    def update(self, sums: Tensor, counts: Tensor, *, momentum: float) -> None:
        """Move each code towards the mean of its vectors, and update ``usage``.

        Codes without vectors are unchanged.

        Args:
            sums: Sum of the unit vectors of each code, over all ranks, (K, D).
            counts: Number of vectors of each code, over all ranks, (K,).
            momentum: Weight of the old codebook, in [0, 1].
        """
        means = F.normalize(sums.to(self.codebook.dtype), dim=1)
        means = torch.where(counts[:, None] > 0, means, self.codebook)
        self.codebook.copy_(F.normalize(self.codebook.lerp(means, 1 - momentum), dim=1))
        self.usage.lerp_(counts.to(self.usage.dtype), 1 - momentum)
