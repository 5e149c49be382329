"""Targets from frozen networks for the patches of a student: features, or discrete tokens.

B: images, h x w patches of the student in a grid, N = h * w; D: width of the frozen network.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.errors import UserError
from selftask.models.features.extract import FeatureExtractor, adapter_of, extract, offers
from selftask.models.features.tokens import Features, Grid
from selftask.models.precision import to_float32
from selftask.models.weights.frozen import Frozen


class PooledTeacher(Frozen):
    """A frozen network that gives features of images.

    Args:
        backbone: Images (B, C, H, W) -> (B, D).
        key: Key of the config that names it, for messages.
    """

    def on_grid(self, images: Tensor, grid: Grid | None) -> tuple[Tensor, ...]:
        """Return a tuple of the pooled features (B, D); ``grid`` is ignored."""
        return (to_float32(self(images)),)


class PatchTeacher(Frozen):
    """A frozen backbone that gives features of patches.

    Args:
        backbone: Backbone with ``"dense"`` in its ``offers``.
        key: Key of the config that names it, for messages.

    Raises:
        UserError: If it has no patches.
    """

    def __init__(self, backbone: nn.Module, key: str) -> None:
        if "dense" not in offers(backbone):
            raise UserError(
                f"{key}: a {type(backbone).__name__} gives one vector an image and no patches; "
                "give it a method extract (docs/methods.md), or take a model of timm or torchvision"
            )
        super().__init__(FeatureExtractor(backbone), key)

    def on_grid(self, images: Tensor, grid: Grid | None) -> tuple[Tensor, ...]:
        """Return pooled features (B, D), and the patches as ``patches_on_grid`` returns them."""
        features: Features = self(images)
        return to_float32(features.pooled), patches_on_grid(features, grid)


@torch.no_grad()
def patches_on_grid(features: Features, grid: Grid | None) -> Tensor:
    """Return the patches of features, float32 (B, h * w, D), interpolated to ``grid`` (h, w).

    ``grid`` may be None only if the features have no grid, such as those of some own backbones.
    """
    patches = to_float32(features.patches)
    if features.tokens.grid == grid:
        return patches
    as_map = features.tokens._replace(patches=patches).map  # (B, D, h', w')
    resized = F.interpolate(as_map, size=grid, mode="bilinear", antialias=True)
    return resized.flatten(2).transpose(1, 2)


class PatchTokenizer(nn.Module):
    """A trained backbone with a head for patches: images -> the token of each patch, int64 (B, N).

    Args:
        backbone: Backbone with ``"tokens"`` in its ``offers``.
        head: Patches (B, N, D) -> scores (B, N, num_tokens). The token of a patch is the index of
            its largest score.
        num_tokens: Number of tokens.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module, num_tokens: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.num_tokens = num_tokens
        self.patch_size = adapter_of(backbone).stride

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(extract(self.backbone, images).patches)
        return scores.argmax(dim=-1)


class TokenTargets(Frozen):
    """A frozen tokenizer: images -> tokens (B, N), one for each patch of the student.

    If the tokenizer has a ``patch_size``, images are resized so that it has the same grid of
    patches as the student.

    Args:
        tokenizer: Images -> tokens (B, N), int64 below its attribute ``num_tokens``, row by row.
            Its ``patch_size`` is in pixels, a number or a pair (height, width).
        key: Key of the config that names it, for messages.

    Raises:
        UserError: If it has no integer ``num_tokens``.
    """

    def __init__(self, tokenizer: nn.Module, key: str) -> None:
        super().__init__(tokenizer, key)
        self.num_tokens: Any = getattr(tokenizer, "num_tokens", None)
        if not isinstance(self.num_tokens, int):
            raise UserError(
                f"{key}: a {type(tokenizer).__name__} is no tokenizer; it needs an attribute "
                "num_tokens, and returns the token of each patch, (B, N) int64"
            )

    def on_grid(self, images: Tensor, grid: Grid) -> Tensor:
        """Return tokens, int64 (B, h * w), of images (B, C, H, W), for a grid (h, w) of patches.

        Raises:
            UserError: If the tokenizer returns another number of tokens.
        """
        patch: Any = getattr(self.network, "patch_size", None)
        if patch is not None:
            down, across = (patch, patch) if isinstance(patch, int) else patch
            size = (grid[0] * down, grid[1] * across)
            if images.shape[-2:] != size:
                images = F.interpolate(images, size=size, mode="bicubic", antialias=True)
        tokens: Tensor = self(images)
        if tokens.shape[1:] != (grid[0] * grid[1],):
            raise UserError(
                f"{self.key}: it gives tokens {tuple(tokens.shape[1:])} for an image, and the "
                f"backbone has {grid[0]}x{grid[1]} patches; an attribute patch_size of the "
                "tokenizer lets images be resized"
            )
        return tokens
