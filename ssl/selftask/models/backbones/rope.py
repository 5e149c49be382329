"""Rotary positions (RoPE) for timm's Eva: coordinates drawn per sample, and CAPI's form.

B images, N patches, R registers, D features of an attention head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import RotaryEmbeddingDinoV3
from timm.layers.pos_embed_sincos import make_coords_dinov3
from torch import Tensor, nn

from selftask.errors import UserError
from selftask.random.keyed import LAYER_DRAWS
from selftask.random.splitmix import shift_right, splitmix64


def draw_coordinates_per_sample(model: nn.Module) -> None:
    """Make the RoPE of timm's Eva draw its random coordinates per sample.

    W ranks then draw the same values as one rank. timm draws once for each pass, from torch's
    generator. A model whose RoPE is not random remains unchanged.

    Raises:
        UserError: If the RoPE is random but not of DINOv3's form.
    """
    rope: Any = getattr(model, "rope", None)
    if not getattr(rope, "aug_active", False):
        return
    if type(rope) is not RotaryEmbeddingDinoV3:
        raise UserError(
            "backbone.args: rope_shift_coords, rope_jitter_coords and rope_rescale_coords are "
            "drawn for RoPE of DINOv3's form only (rope_type: dinov3)"
        )
    rope.__class__ = DrawnRope
    rope._draw_number = -1
    model.register_forward_pre_hook(_begin_pass)


class DrawnRope(RotaryEmbeddingDinoV3):
    """DINOv3's RoPE, whose coordinates are shifted, jittered and rescaled per sample in training.

    The draws are a function of (seed, epoch, sample, view), like those of dropout. Without them,
    outside of a run, all images of a pass share draws of torch's generator, as in timm.
    """

    _draw_number: int

    def get_embed(
        self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return sines and cosines, (N, 2 * D), or by image, (B, 1, N, 2 * D), if they are random.

        They are random in training, unless disabled. Without draws per sample, B is 1.

        Args:
            shape: Rows and columns of patches; by default those given to the constructor.
            dtype: Type of the result; by default float32.
        """
        if not (self.training and self.aug_active):
            return super().get_embed(shape, dtype)
        coordinates = make_coords_dinov3(
            *(shape or self.feat_shape),
            normalize_coords=self.normalize_coords,
            grid_indexing=self.grid_indexing,
            grid_offset=self.grid_offset,
            device=self.periods.device,
        )
        moved = self._moved(coordinates)  # (B, N, 2)
        sin, cos = self._get_pos_embed_from_coords(moved.flatten(0, 1))
        embedding = torch.cat([sin, cos], dim=-1).unflatten(0, moved.shape[:2])
        return embedding[:, None].to(dtype or embedding.dtype)

    def _moved(self, coordinates: Tensor) -> Tensor:
        """Shift, jitter and rescale coordinates (N, 2) for each image: (B, N, 2)."""
        draws = self._draws(coordinates.device)  # (B, 5), from -1 to 1
        shift, jitter, rescale = draws.split([2, 2, 1], dim=1)
        exponents = jitter * math.log(self.jitter_coords or 1.0)
        exponents = exponents + rescale * math.log(self.rescale_coords or 1.0)
        shifted = coordinates + shift[:, None] * (self.shift_coords or 0.0)
        return shifted * exponents.exp()[:, None]

    def _draws(self, device: torch.device) -> Tensor:
        words = LAYER_DRAWS.words
        if words is None:
            return 2 * torch.rand(1, 5, device=device) - 1
        bits = splitmix64(words[self._draw_number][:, None], torch.arange(5, device=device))
        return shift_right(bits, 40).float() * 2.0**-23 - 1


def _begin_pass(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Set the draws for images that are passed to the model directly, not by ``extract``."""
    if LAYER_DRAWS.words is not None and len(inputs[0]) != LAYER_DRAWS.words.shape[1]:
        LAYER_DRAWS.enter_next(len(inputs[0]))


class CapiRope(nn.Module):
    """CAPI's RoPE: coordinates from 0 to 1, and registers around the encoded patches.

    Registers are at equal distances on the bounding box of the encoded patches. As in the published
    code, the angles of the first half of a head's features depend on the row and those of the
    second half on the column, although feature i is rotated with feature i + D / 2. Unlike there,
    frequencies are fixed, not parameters of each block.

    Args:
        dim: Features of an attention head, D.
        num_registers: Number of registers, R, a multiple of 4.
        grid: Rows and columns of patches of the model's image size.
    """

    angular: Tensor  # (2, D) frequencies, times 2 pi
    border: Tensor  # (R, 2)

    def __init__(self, dim: int, num_registers: int, grid: Sequence[int]) -> None:
        super().__init__()
        # after transformers has loaded a model, ``with torch.device`` may not set linspace's device
        device = torch.get_default_device()
        exponents = torch.linspace(0, 1, dim // 4, dtype=torch.float64, device=device)
        frequencies = 7.0 * 1e4**-exponents
        pairs, none = torch.cat([frequencies, frequencies]), torch.zeros(dim // 2)
        angular = 2 * math.pi * torch.stack([torch.cat([pairs, none]), torch.cat([none, pairs])])
        border = border_coordinates(num_registers)
        dtype = torch.get_default_dtype()
        self.register_buffer("angular", angular.to(dtype), persistent=False)
        self.register_buffer("border", border.to(dtype), persistent=False)
        self.grid = tuple(grid)

    def get_embed(self, shape: Sequence[int] | None = None) -> Tensor:
        """Return sines and cosines of registers and all patches, (R + N, 2 * D)."""
        return self.of_kept(shape or self.grid, None, None)

    def of_kept(self, shape: Sequence[int], keep: Tensor | None, padding: Tensor | None) -> Tensor:
        """Return sines and cosines of registers and the patches ``keep``.

        Args:
            shape: Rows and columns of patches.
            keep: (B, K) indices of the patches; None for all.
            padding: (B, K) bool, True for padding in ``keep``; None: there is none.

        Returns:
            (B, 1, R + K, 2 * D), or (R + N, 2 * D) for all patches.
        """
        device, dtype = self.angular.device, self.angular.dtype
        rows, columns = (torch.linspace(0, 1, n, device=device, dtype=dtype) for n in shape)
        patches = torch.cartesian_prod(rows, columns)  # (N, 2)
        if keep is None:
            return self.embed(torch.cat([self.border, patches]))
        kept = patches[keep]  # (B, K, 2)
        outside = torch.zeros_like(kept) if padding is None else padding[..., None] * 2.0
        first, last = (kept + outside).amin(1, keepdim=True), (kept - outside).amax(1, keepdim=True)
        registers = first + self.border * (last - first)  # (B, R, 2)
        return self.embed(torch.cat([registers, kept], dim=1))[:, None]

    def embed(self, coordinates: Tensor) -> Tensor:
        """Return sines and cosines, (..., 2 * D), of coordinates (..., 2): row and column."""
        row, column = coordinates[..., None].unbind(dim=-2)  # (..., 1)
        angles = row * self.angular[0] + column * self.angular[1]  # autocast rounds matmul
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


def border_coordinates(number: int) -> Tensor:
    """Return points at equal distances on the border of the unit square, (``number``, 2).

    ``number`` must be a multiple of 4.
    """
    side = torch.arange(number // 4, dtype=torch.float64) / max(1, number // 4)
    none, one = torch.zeros_like(side), torch.ones_like(side)
    sides = [(side, none), (one, side), (1 - side, one), (none, 1 - side)]
    return torch.cat([torch.stack(pair, dim=1) for pair in sides])
