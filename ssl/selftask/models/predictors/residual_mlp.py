"""Prediction from each token separately, as in the head of AIM."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

_norm: Any = partial(nn.LayerNorm, eps=1e-6)


class ResidualMLP(nn.Module):
    """Residual blocks of two layers: tokens (..., E) -> outputs (..., num_out).

    AIM (arXiv:2401.08541), section 3.2.

    Args:
        embed_dim: Width of a token, E.
        dim: Width of the blocks.
        depth: Number of blocks.
        num_out: Number of outputs per token.
    """

    def __init__(self, embed_dim: int, *, dim: int, depth: int, num_out: int) -> None:
        super().__init__()
        self.embed = nn.Linear(embed_dim, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(_norm(dim), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
            for _ in range(depth)
        )
        self.norm = _norm(dim)
        self.project = nn.Linear(dim, num_out)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.project(self.norm(x))
