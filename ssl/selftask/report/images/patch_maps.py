"""Show patch tokens of images as colors: their first three principal components.

B images, N patches in a grid of h x w, E features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from selftask.models.eval_mode import in_eval_mode
from selftask.models.features.extract import extract, offers
from selftask.report.images.projections import pca
from selftask.report.images.sprite import Sprite, image_section
from selftask.report.page import Section, render

BUDGET = 250_000  # largest size of the images, in characters
_SIDE = 160
_CLIPPED = 1.0  # per cent of the values that are clipped at each end of the color range


def has_patches(backbone: nn.Module) -> bool:
    """Return whether a backbone has patch tokens, as vision transformers have."""
    return {"dense", "tokens"} <= offers(backbone)


@torch.no_grad()
def patch_tokens(backbone: nn.Module, images: Tensor) -> np.ndarray:
    """Return the patch tokens of the last layer: images (B, C, H, W) -> (B, h, w, E)."""
    with in_eval_mode(backbone):
        patches = extract(backbone, images).tokens.map
    return patches.permute(0, 2, 3, 1).float().cpu().numpy()


def patch_colors(tokens: np.ndarray) -> np.ndarray:
    """Return the first three principal components of all patches as colors.

    The components are computed over the patches of all images together, so that a color has the
    same meaning in every image.

    Args:
        tokens: (B, h, w, E).

    Returns:
        uint8 (B, h, w, 3).
    """
    scores, _ = pca(tokens.reshape(-1, tokens.shape[-1]), 3)
    low, high = np.percentile(scores, [_CLIPPED, 100 - _CLIPPED], axis=0)
    scaled = ((scores - low) / np.maximum(high - low, 1e-12)).clip(0, 1)
    return np.rint(255 * scaled).astype(np.uint8).reshape(*tokens.shape[:-1], 3)


def patch_section(
    pixels: Sequence[np.ndarray], names: Sequence[str], tokens: np.ndarray
) -> Section:
    """Return the section with images next to color maps of their patch tokens.

    Args:
        pixels: B images, uint8 (H, W, C), as seen by the network.
        names: Names of the images.
        tokens: (B, h, w, E).
    """
    sprite = Sprite("patches", _SIDE, BUDGET)
    maps = [_as_large(*pair) for pair in zip(patch_colors(tokens), pixels, strict=True)]
    samples = list(zip(pixels, maps, names, strict=True))
    html = render("images.pairs", sprite, samples, *tokens.shape[1:3])
    return image_section("Patch tokens", html, "patch-tokens", sprite)


def _as_large(colors: np.ndarray, image: np.ndarray) -> np.ndarray:
    """Enlarge a map (h, w, 3) by repetition to about the displayed size of the image."""
    side = max(max(image.shape[:2]), _SIDE)
    times = max(1, round(side / max(colors.shape[:2])))
    return colors.repeat(times, axis=0).repeat(times, axis=1)
