"""Test-time augmentation: features averaged over mirrored and resized images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.errors import UserError
from selftask.models.build import check_images
from selftask.models.features.extract import adapter_of, fixed_size, interpolates, pooled


class AveragedViews(nn.Module):
    """Wrapper that averages the output of a model over views of each image.

    Args:
        model: Images (B, C, H, W) -> features (B, E), such as a backbone or ``PooledLayers``.
        backbone: The backbone, which may be ``model``.
        flip: Whether to add the mirror image of each view.
        scales: Sizes of the views, relative to the size of the images.

    Raises:
        UserError: If the backbone accepts one image size only, and a scale is not 1; in
            ``forward``, if ``model`` is the backbone and does not accept the size of the images.
    """

    def __init__(
        self, model: nn.Module, backbone: nn.Module, *, flip: bool, scales: Sequence[float]
    ) -> None:
        super().__init__()
        only = fixed_size(backbone)
        if only is not None and not interpolates(backbone) and set(scales) != {1.0}:
            raise UserError(
                f"eval.scales: a {type(backbone).__name__} takes images of {only[0]}x{only[1]} "
                "pixels only"
            )
        self.model, self.flip, self.scales = model, flip, tuple(scales)
        self.is_backbone = model is backbone
        self.multiple = multiple_of(backbone)

    def forward(self, images: Tensor) -> Tensor:
        """Return features (B, E) of images (B, C, H, W)."""
        if self.is_backbone:
            check_images(self.model, images)
        views = resized_views(images, self.scales, self.multiple, flip=self.flip)
        outputs = [pooled(self.model, x) if self.is_backbone else self.model(x) for x in views]
        return torch.stack(outputs).mean(dim=0)


def multiple_of(backbone: nn.Module) -> tuple[int, int]:
    """Return the numbers of pixels of which the height and width of resized views are multiples.

    They are those of a patch if positions are interpolated, else 1.
    """
    if not interpolates(backbone):
        return 1, 1
    rows, columns = adapter_of(backbone).patch_size
    return max(1, rows), max(1, columns)


def resized_views(
    images: Tensor, scales: Sequence[float], multiple: tuple[int, int], *, flip: bool
) -> Iterator[Tensor]:
    """Yield resized images, each followed by its mirror image if ``flip``.

    Args:
        images: (B, C, H, W).
        scales: Sizes relative to the images.
        multiple: Height and width of a view are multiples of these numbers of pixels.
        flip: Whether to mirror.
    """
    for scale in scales:
        height, width = (
            max(1, round(side * scale / by)) * by
            for side, by in zip(images.shape[-2:], multiple, strict=True)
        )
        view = images
        if (height, width) != tuple(images.shape[-2:]):
            view = F.interpolate(
                images, (height, width), mode="bilinear", align_corners=False, antialias=True
            )
        yield view
        if flip:
            yield view.flip(-1)
