"""Decoder of an image from the feature maps of visible patches: SparK, arXiv:2301.03580.

B images, K visible patches of a grid of h x w, E width of a map of H x W positions, D width of the
decoder there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from selftask.models.features.sparse import VISIBLE, see_visible_patches


class UNetDecoder(nn.Module):
    """Decoder that adds a map at each level, then doubles the resolution and halves the width.

    Args:
        widths: Widths E of the maps, from the coarsest; each map has twice the resolution of the
            previous one. There may be fewer maps than levels.
        dim: Width at the coarsest resolution, divisible by ``stride``.
        stride: Pixels between positions of the coarsest map, a power of 2.
        channels: Channels of the image, C.
        batch_norm: Whether maps are normalized by BatchNorm, with statistics of visible positions,
            instead of LayerNorm; should match the backbone.
    """

    def __init__(
        self, widths: Sequence[int], *, dim: int, stride: int, channels: int, batch_norm: bool
    ) -> None:
        super().__init__()
        num_levels = stride.bit_length() - 1
        sizes = [dim >> level for level in range(num_levels + 1)]
        self.up = nn.ModuleList(_Up(wide, narrow) for wide, narrow in pairwise(sizes))
        self.project = nn.Conv2d(sizes[-1], channels, 1)
        self.apply(_initialize)
        self.densify = nn.ModuleList(
            Densify(width, size, kernel=3 if level else 1, batch_norm=batch_norm)
            for level, (width, size) in enumerate(zip(widths, sizes[:-1], strict=False))
        )

    def forward(self, maps: Sequence[Tensor], visible: Tensor, hidden: Tensor) -> Tensor:
        """Return images (B, C, H, W).

        Args:
            maps: (B, E, H, W) each, from the coarsest; as many as ``widths``.
            visible: int64 (B, K), indices of the visible patches.
            hidden: (B, h, w) bool, True for hidden patches.
        """
        with VISIBLE.only(visible, (hidden.shape[1], hidden.shape[2])):
            dense = [fill(x) for fill, x in zip(self.densify, maps, strict=True)]
        x = dense[0]
        for level, up in enumerate(self.up):
            x = up(x + dense[level] if 0 < level < len(dense) else x)
        return self.project(x)


class Densify(nn.Module):
    """Norm, trained vector at hidden positions, convolution: (B, E, H, W) -> (B, D, H, W).

    Args:
        width: Width E of the map.
        dim: Width D of the result.
        kernel: Side of the kernel, odd. If it is 1 and E = D, there is no convolution.
        batch_norm: As in ``UNetDecoder``.
    """

    def __init__(self, width: int, dim: int, *, kernel: int, batch_norm: bool) -> None:
        from timm.layers import LayerNorm2d

        super().__init__()
        self.norm = nn.BatchNorm2d(width) if batch_norm else LayerNorm2d(width, eps=1e-6)
        self.mask_token = nn.Parameter(nn.init.trunc_normal_(torch.empty(width), std=0.02))
        self.project: nn.Module = nn.Identity()
        if kernel > 1 or width != dim:
            self.project = nn.Conv2d(width, dim, kernel, padding=kernel // 2)
        see_visible_patches(self.norm)

    def forward(self, x: Tensor) -> Tensor:
        x = fill_hidden(self.norm(x), self.mask_token)
        return self.project(x)


def fill_hidden(x: Tensor, token: Tensor) -> Tensor:
    """Return a map (B, E, H, W) with ``token`` (E,) at the hidden positions of this pass."""
    hidden = VISIBLE.hidden((x.shape[2], x.shape[3]))
    return torch.where(hidden, token.to(x.dtype)[:, None, None], x)


class _Up(nn.Module):
    """Transposed convolution, then two convolutions: (B, D, H, W) -> (B, D', 2H, 2W)."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.enlarge = nn.ConvTranspose2d(wide, wide, 4, stride=2, padding=1)
        self.convolve = nn.Sequential(
            nn.Conv2d(wide, wide, 3, padding=1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, narrow, 3, padding=1, bias=False),
            nn.BatchNorm2d(narrow),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.convolve(self.enlarge(x))


def _initialize(part: nn.Module) -> None:
    """Initialize a layer as in the authors' code."""
    if isinstance(part, nn.Conv2d):
        nn.init.trunc_normal_(part.weight, std=0.02)
    elif isinstance(part, nn.ConvTranspose2d):
        nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    if isinstance(part, nn.Conv2d | nn.ConvTranspose2d) and part.bias is not None:
        nn.init.zeros_(part.bias)
