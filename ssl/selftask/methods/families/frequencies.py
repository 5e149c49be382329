"""Methods that filter the frequencies of an image's pixels.

B: images per rank, C: channels, H, W: size of the images in pixels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selftask.data.transforms.normalize import moments_of
from selftask.errors import UserError
from selftask.methods.base import Method

if TYPE_CHECKING:
    from selftask.task import Task


class PixelFilter(Method):
    """Method that undoes the normalization of its views, to filter pixels in [0, 1]."""

    mean: Tensor  # (C, 1, 1), of the normalization of the first group of views
    std: Tensor

    def read_moments(self, task: Task) -> None:
        """Set ``mean`` and ``std``; raise UserError if the views are not normalized by channel."""
        channels = task.data_module.channels
        group = next(group for group in task.config.views.values() if group.count)
        moments = moments_of([part.to_dict() for part in group.transforms], channels)
        if moments is None:
            raise UserError(
                f"views: {task.config.method.name} changes pixels in [0, 1]; end the transforms by "
                "normalize"
            )
        for name, values in zip(("mean", "std"), moments, strict=True):
            self.register_buffer(name, torch.tensor(values)[:, None, None], persistent=False)


def low_frequencies(size: tuple[int, int], radius: int, device: torch.device) -> Tensor:
    """Return a mask (H, W) in the order of ``torch.fft``, True in a disc around frequency 0.

    Args:
        size: Height and width of the images in pixels.
        radius: Radius of the disc, in periods per image.
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
        Complex (B, C, H, W). It is real if ``removed`` is symmetric around frequency 0.
    """
    spectrum = torch.fft.fft2(pixels)
    return torch.fft.ifft2(spectrum.masked_fill(removed.unsqueeze(-3), 0.0))
