"""Masks of spatial frequencies, and removal of frequencies from images.

B images of C channels, H x W pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def low_frequencies(size: tuple[int, int], radius: int, device: torch.device) -> Tensor:
    """Return a bool mask (H, W) in the order of ``torch.fft``, True in a disc around frequency 0.

    Args:
        size: Height and width of the images in pixels.
        radius: Radius of the disc, in periods per image; its boundary is outside.
        device: Device of the mask.
    """
    squares = [(torch.fft.fftfreq(n, device=device) * n).round().square() for n in size]
    return squares[0][:, None] + squares[1] < radius**2


def without(pixels: Tensor, removed: Tensor) -> Tensor:
    """Set frequencies of images to zero.

    Args:
        pixels: (B, C, H, W), in float32 or float64.
        removed: (B, H, W) or (H, W) bool, True for frequencies to remove.

    Returns:
        Complex images (B, C, H, W); imaginary parts are 0 if ``removed`` is symmetric around
        frequency 0.
    """
    spectrum = torch.fft.fft2(pixels)
    return torch.fft.ifft2(spectrum.masked_fill(removed.unsqueeze(-3), 0.0))
