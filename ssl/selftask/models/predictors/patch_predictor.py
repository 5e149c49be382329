"""Prediction of patches from other patches, with sine-cosine positions.

B images, N patches of an image (row by row), K of them encoded, M groups of Q patches to predict, P
prefix tokens, E width of the backbone, D width of the predictor.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from selftask.errors import UserError
from selftask.models.features.extract import adapter_of
from selftask.models.features.tokens import Grid, attention_mask


class GridPositions(nn.Module):
    """Fixed sine-cosine positions of patches, for images of any size.

    Args:
        dim: Width D of the positions; divisible by 4.
        grid: Rows and columns of the patches of an image of the usual size.
    """

    positions: Tensor  # (N, D)

    def __init__(self, dim: int, grid: Grid) -> None:
        super().__init__()
        self.grid = grid
        self.register_buffer("positions", sincos_positions(dim, grid), persistent=False)

    def positions_on(self, grid: Grid) -> Tensor:
        """Return the positions of the patches of a grid, (N, D)."""
        if grid == self.grid:
            return self.positions
        return sincos_positions(self.positions.shape[1], grid).to(self.positions)


class PatchPredictor(GridPositions):
    """Transformer that predicts outputs for some patches from other, encoded patches of the image.

    It is the decoder of MAE and the predictor of I-JEPA. Its input is the encoded patches and a
    learned mask token for each patch to predict, all with fixed sine-cosine positions. Patches that
    are predicted together attend to each other.

    Args:
        embed_dim: Width E of the encoded patches.
        grid: Rows and columns of patches.
        dim: Width D of the predictor; divisible by 4 and by ``num_heads``.
        depth: Number of blocks.
        num_heads: Attention heads of a block.
        num_out: Number of outputs per patch.
    """

    def __init__(
        self, embed_dim: int, grid: Grid, *, dim: int, depth: int, num_heads: int, num_out: int
    ) -> None:
        super().__init__(dim, grid)
        self.embed = nn.Linear(embed_dim, dim)
        self.mask_token = nn.Parameter(nn.init.normal_(torch.empty(dim), std=0.02))
        self.blocks = transformer_blocks(dim, depth, num_heads)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.project = nn.Linear(dim, num_out)

    def forward(
        self,
        encoded: Tensor,
        keep: Tensor,
        predict: Tensor,
        *,
        padding: Tensor | None = None,
        predict_padding: Tensor | None = None,
        grid: Grid | None = None,
    ) -> Tensor:
        """Predict the patches of each of M groups separately.

        Args:
            encoded: (B, P + K, E), prefix tokens and the patches ``keep``.
            keep: (B, K) indices of the encoded patches.
            predict: (B, M, Q) indices of the patches to predict.
            padding: (B, K) bool, True for padding in ``keep``, to which no token attends.
            predict_padding: The same for ``predict``, (B, M, Q). Either has an effect only if both
                are given.
            grid: Rows and columns of patches; by default those of the constructor.

        Returns:
            (B, M, Q, num_out).
        """
        positions = self.positions if grid is None else self.positions_on(grid)
        num_groups = predict.shape[1]
        context = self.embed(encoded)  # (B, P + K, D)
        num_prefix = context.shape[1] - keep.shape[1]
        context = torch.cat([context[:, :num_prefix], context[:, num_prefix:] + positions[keep]], 1)
        context = context.repeat_interleave(num_groups, dim=0)  # (B * M, P + K, D)
        queries = self.mask_token + positions[predict.flatten(0, 1)]  # (B * M, Q, D)
        x = torch.cat([context, queries], dim=1)
        attend = None
        if padding is not None and predict_padding is not None:
            each = padding.repeat_interleave(num_groups, dim=0)  # (B * M, K)
            attend = attention_mask(torch.cat([each, predict_padding.flatten(0, 1)], 1), num_prefix)
        for block in self.blocks:
            x = block(x, attn_mask=attend)
        return self.read(x, keep, predict)

    def read(self, tokens: Tensor, keep: Tensor, predict: Tensor) -> Tensor:
        """Return the predictions (B, M, Q, num_out) from the output tokens of the last block.

        Args:
            tokens: (B * M, P + K + Q, D): prefix tokens, encoded patches, patches to predict.
            keep: (B, K), as in ``forward``.
            predict: (B, M, Q), as in ``forward``.
        """
        output: Tensor = self.project(self.norm(tokens[:, -predict.shape[2] :]))  # (B * M, Q, out)
        return output.view(*predict.shape, -1)


def transformer_blocks(dim: int, depth: int, num_heads: int) -> nn.Sequential:
    """Return ``depth`` blocks of a vision transformer: (B, N, dim) -> (B, N, dim)."""
    from timm.models.vision_transformer import Block

    norm = partial(nn.LayerNorm, eps=1e-6)
    return nn.Sequential(
        *(Block(dim, num_heads, qkv_bias=True, norm_layer=norm) for _ in range(depth))
    )


def sincos_positions(dim: int, grid: tuple[int, int]) -> Tensor:
    """Return fixed positions of a grid of patches, (N, dim): MAE, appendix A.1.

    The first half encodes the column, the second the row, each as sines followed by cosines of the
    frequencies 10000 ** (-4i / dim), for i from 0 to dim / 4 - 1.

    Raises:
        ValueError: If ``dim`` is not divisible by 4.
    """
    if dim % 4:
        raise ValueError(f"2-D sine-cosine positions need a width divisible by 4, got {dim}")
    rows, columns = grid
    frequency = 10_000.0 ** (-torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    angles = [axis.reshape(-1, 1) * frequency for axis in (x, y)]  # each (N, dim / 4)
    parts = [part for angle in angles for part in (angle.sin(), angle.cos())]
    return torch.cat(parts, dim=1).float()


@torch.no_grad()
def fix_sincos_positions(backbone: nn.Module) -> None:
    """Set fixed sine-cosine positions in a vision transformer, and zeros for prefix tokens.

    As in MAE (appendix A.1) and I-JEPA. The positions then require no gradients. Models that have
    only rotary positions are unchanged. Raises UserError for a backbone without any positions.
    """
    adapter = adapter_of(backbone)
    if adapter.positions is None:
        if getattr(backbone, "rope", None) is not None:
            return
        raise UserError("backbone: this transformer has no position embedding to fix")
    positions = sincos_positions(adapter.positions.shape[-1], adapter.built_grid)  # (N, E)
    adapter.positions.zero_()
    adapter.positions[0, -len(positions) :] = positions
    adapter.positions.requires_grad_(False)
