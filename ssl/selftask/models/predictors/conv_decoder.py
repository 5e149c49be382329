"""The convolutional decoder of data2vec 2.0.

B images, N patches in a grid of h x w, E width of the backbone, D width of the decoder.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.models.features.tokens import Grid


class ConvDecoder(nn.Module):
    """Grouped convolutions on the grid of patches, then a linear layer: (B, N, E) -> (B, N, E).

    Each convolution is followed by a norm over channels, without parameters, and a GELU. The input
    of the convolution is then added if it has the same number of channels.

    Args:
        embed_dim: Width E of the patches; divisible by ``groups``.
        dim: Width D of the decoder; divisible by ``groups``.
        depth: Number of convolutions.
        kernel: Side of the kernels, odd.
        groups: Groups of channels of a convolution.
    """

    def __init__(self, embed_dim: int, *, dim: int, depth: int, kernel: int, groups: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(dim if number else embed_dim, dim, kernel, padding=kernel // 2, groups=groups)
            for number in range(depth)
        )
        self.project = nn.Linear(dim, embed_dim)

    def forward(self, patches: Tensor, grid: Grid) -> Tensor:
        x = patches.transpose(1, 2).unflatten(2, grid)  # (B, E, h, w)
        for layer in self.layers:
            y = layer(x).permute(0, 2, 3, 1)  # (B, h, w, D)
            y = F.gelu(F.layer_norm(y, y.shape[-1:])).permute(0, 3, 1, 2)
            x = y + x if x.shape == y.shape else y
        return self.project(x.flatten(2).transpose(1, 2))
