"""A small transformer over all patches of an image.

B: images, N = h * w: patches, C: channels of the input, D: width of the decoder.
"""

from __future__ import annotations

from torch import Tensor, nn

from selftask.models.features.tokens import Grid
from selftask.models.predictors.patch_predictor import GridPositions, transformer_blocks


class PatchDecoder(GridPositions):
    """Transformer with fixed sine-cosine positions: patches (B, N, C) -> (B, N, ``num_out``).

    Args:
        num_in: Number of channels of a patch, C.
        num_out: Number of outputs per patch.
        grid: Rows and columns of patches.
        dim: Width, D; divisible by 4 and by ``num_heads``.
        depth: Number of blocks.
        num_heads: Attention heads of a block.
    """

    def __init__(
        self, num_in: int, num_out: int, grid: Grid, *, dim: int, depth: int, num_heads: int
    ) -> None:
        super().__init__(dim, grid)
        self.embed = nn.Linear(num_in, dim)
        self.blocks = transformer_blocks(dim, depth, num_heads)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.project = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, num_out))

    def forward(self, patches: Tensor, grid: Grid) -> Tensor:
        x = self.embed(patches) + self.positions_on(grid)
        return self.project(self.norm(self.blocks(x)))
