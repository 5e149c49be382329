"""Prediction of patches by cross-attention to the encoded patches, without self-attention.

B images, N patches of an image (row by row), K of them encoded, Q to predict, P prefix tokens, E
width of the backbone, D width of the predictor, L encoder layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from selftask.models.features.tokens import Grid
from selftask.models.precision.bfloat16 import attention
from selftask.models.predictors.patch_predictor import GridPositions

_norm: Any = partial(nn.LayerNorm, eps=1e-6)


class MemoryPredictor(GridPositions):
    """Decoder of CrossMAE (arXiv:2401.14391): each block reads a mixture of the encoder's layers.

    Args:
        embed_dim: Width E of the encoded patches.
        grid: Rows and columns of patches.
        num_layers: Number L of encoder layers to mix; None: all blocks read the same layer.
        dim: Width D of the decoder; divisible by 4 and by ``num_heads``.
        depth: Number of blocks.
        num_heads: Attention heads of a block.
        num_out: Number of outputs per patch.
    """

    def __init__(
        self,
        embed_dim: int,
        grid: Grid,
        num_layers: int | None,
        *,
        dim: int,
        depth: int,
        num_heads: int,
        num_out: int,
    ) -> None:
        super().__init__(dim, grid)
        self.mask_token = nn.Parameter(nn.init.normal_(torch.empty(dim), std=0.02))
        self.mixture: nn.Parameter | None = None
        if num_layers is not None:
            self.mixture = nn.Parameter(torch.randn(depth, num_layers) * num_layers**-0.5)
        self.blocks = nn.ModuleList(MemoryBlock(dim, embed_dim, num_heads) for _ in range(depth))
        self.norm = _norm(dim)
        self.project = nn.Linear(dim, num_out)

    def forward(self, layers: Sequence[Tensor], predict: Tensor, grid: Grid) -> Tensor:
        """Predict patches from the outputs of L encoder layers.

        Args:
            layers: L tensors (B, P + K, E); one if they are not mixed.
            predict: (B, Q) indices of the patches to predict.
            grid: Rows and columns of patches.

        Returns:
            (B, Q, num_out).
        """
        x = self.mask_token + self.positions_on(grid)[predict]  # (B, Q, D)
        read = [*layers] * len(self.blocks)
        if self.mixture is not None:
            read = [*torch.einsum("dl,lbke->dbke", self.mixture, torch.stack([*layers]))]
        for block, memory in zip(self.blocks, read, strict=True):
            x = block(x, memory)
        return self.project(self.norm(x))


class MemoryBlock(nn.Module):
    """Cross-attention and an MLP, both residual: queries (B, Q, D), memory (B, M, E) -> (B, Q, D).

    Args:
        dim: Width D of the queries.
        memory_dim: Width E of the memory.
        num_heads: Number of attention heads.
    """

    def __init__(self, dim: int, memory_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_queries, self.norm_memory = _norm(dim), _norm(memory_dim)
        self.norm_mlp = _norm(dim)
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(memory_dim, 2 * dim)
        self.project = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        queries = self._split(self.query(self.norm_queries(x)))
        keys, values = self.key_value(self.norm_memory(memory)).chunk(2, dim=-1)
        attended = attention(queries, self._split(keys), self._split(values))
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))

    def _split(self, x: Tensor) -> Tensor:
        """(B, M, D) -> (B, heads, M, D / heads)."""
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
