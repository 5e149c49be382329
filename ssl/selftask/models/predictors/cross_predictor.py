"""Prediction of patches by cross-attention to other patches, as in CAPI.

B images, K encoded patches, P prefix tokens, the last R of which have positions, Q patches to
predict, E width of the backbone, D width of the predictor, F features of an attention head.
"""

from __future__ import annotations

import torch
from timm.layers import DropPath, apply_rot_embed_cat
from torch import Tensor, nn

from selftask.models.backbones.rope import CapiRope
from selftask.models.features.tokens import Grid
from selftask.models.precision.bfloat16 import attention


class CrossPredictor(nn.Module):
    """Transformer without self-attention: patches to predict attend only to encoded tokens.

    Predictions do not depend on each other. Layers have no biases, and norms are RMSNorm.

    Args:
        embed_dim: Width E of the encoded tokens.
        grid: Rows and columns of patches of the backbone's image size.
        dim: Width D of the predictor; ``dim / num_heads`` must be divisible by 4.
        depth: Number of blocks.
        num_heads: Attention heads of a block.
        num_registers: Number R of registers, with positions on the encoded patches' bounding box.
        drop_path: Rate of stochastic depth in all blocks.
    """

    def __init__(
        self,
        embed_dim: int,
        grid: Grid,
        *,
        dim: int,
        depth: int,
        num_heads: int,
        num_registers: int = 0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.rope = CapiRope(dim // num_heads, num_registers, grid)
        self.num_registers = num_registers
        self.mask_token = nn.Parameter(nn.init.normal_(torch.empty(dim), std=0.02))
        self.blocks = nn.ModuleList(
            CrossBlock(dim, embed_dim, num_heads, drop_path) for _ in range(depth)
        )
        self.norm = nn.RMSNorm(dim, eps=1e-5, elementwise_affine=False)

    def forward(self, encoded: Tensor, keep: Tensor, predict: Tensor, grid: Grid) -> Tensor:
        """Predict features of patches.

        Args:
            encoded: (B, P + K, E), prefix tokens and the patches ``keep``.
            keep: (B, K) indices of the encoded patches.
            predict: (B, Q) indices of the patches to predict.
            grid: Rows and columns of patches.

        Returns:
            (B, Q, D).
        """
        context_rope = self.rope.of_kept(grid, keep, None)  # (B, 1, R + K, 2 * F)
        query_rope = self.rope.of_kept(grid, predict, None)[:, :, self.num_registers :]
        x = self.mask_token.expand(*predict.shape, -1)
        for block in self.blocks:
            x = block(x, query_rope, encoded, context_rope)
        return self.norm(x)


class CrossBlock(nn.Module):
    """Cross-attention, then an MLP, each with a residual connection; see ``CrossAttention``."""

    def __init__(self, dim: int, context_dim: int, num_heads: int, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(dim, eps=1e-5)
        self.attn = CrossAttention(dim, context_dim, num_heads)
        self.norm2 = nn.RMSNorm(dim, eps=1e-5)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim, bias=False), nn.GELU(), nn.Linear(4 * dim, dim, bias=False)
        )
        self.drop_path1, self.drop_path2 = DropPath(drop_path), DropPath(drop_path)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor, rope: Tensor, context: Tensor, context_rope: Tensor) -> Tensor:
        x = x + self.drop_path1(self.attn(self.norm1(x), rope, context, context_rope))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class CrossAttention(nn.Module):
    """Attention of queries to a context, with rotary positions.

    Args:
        dim: Width D of the queries.
        context_dim: Width E of the context.
        num_heads: Number of attention heads.
    """

    def __init__(self, dim: int, context_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(context_dim, dim, bias=False)
        self.value = nn.Linear(context_dim, dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, rope: Tensor, context: Tensor, context_rope: Tensor) -> Tensor:
        """Return the attention of queries to a context.

        Args:
            x: Queries, (B, Q, D).
            rope: Sines and cosines of their positions, (B, 1, Q, 2 * F).
            context: (B, P + K, E).
            context_rope: Like ``rope``, for the last R + K tokens of the context; others are not
                rotated.

        Returns:
            (B, Q, D).
        """
        value = self._by_head(self.value(context))  # (B, H, P + K, F)
        key = self._by_head(self.key(context))
        num_prefix = key.shape[2] - context_rope.shape[2]
        rotated = apply_rot_embed_cat(key[:, :, num_prefix:], context_rope, half=True)
        key = torch.cat([key[:, :, :num_prefix], rotated.type_as(value)], dim=2)
        query = apply_rot_embed_cat(self._by_head(self.query(x)), rope, half=True).type_as(value)
        attended = attention(query, key, value)
        return self.proj(attended.transpose(1, 2).flatten(2))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
