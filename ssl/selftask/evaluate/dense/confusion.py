"""Confusion matrix of pixels, and metrics of semantic segmentation.

C classes, images of S x S pixels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.distributed.accelerator import to_float64


class Confusion:
    """Confusion matrix (C, C) of pixels; rows are true classes, columns are predicted ones.

    Args:
        num_classes: Number of classes, C.
        device: Device of the counts.
    """

    def __init__(self, num_classes: int, device: torch.device | str = "cpu") -> None:
        self.counts = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)

    def add(self, mask: Tensor, predicted: Tensor) -> None:
        """Add pixels to the counts.

        Args:
            mask: Class numbers, integers of any shape; negative ones do not count.
            predicted: Predicted classes of the same shape.
        """
        is_counted, size = mask >= 0, len(self.counts)
        key = mask[is_counted].long() * size + predicted[is_counted]
        self.counts += torch.bincount(key, minlength=size**2).view(size, size)

    def iou(self) -> Tensor:
        """Return the IoU by class, float64 (C,); NaN for classes neither present nor predicted."""
        counts = to_float64(self.counts)
        hits = counts.diagonal()
        return hits / (counts.sum(dim=0) + counts.sum(dim=1) - hits)

    def recall(self) -> Tensor:
        """Return the accuracy of the pixels of each class, float64 (C,); NaN without pixels."""
        counts = to_float64(self.counts)
        return counts.diagonal() / counts.sum(dim=1)

    def metrics(self) -> dict[str, float]:
        """Return pixel ``accuracy``, and the means over classes ``miou`` and ``class_accuracy``.

        Classes whose ``iou`` or ``recall`` is NaN are left out of its mean.
        """
        counts = to_float64(self.counts)
        return {
            "miou": float(self.iou().nanmean()),
            "accuracy": float(counts.diagonal().sum() / counts.sum()),
            "class_accuracy": float(self.recall().nanmean()),
        }


def upsampled_classes(scores: Tensor, size: int) -> Tensor:
    """Return the class with the highest interpolated score at each pixel, (S, S).

    Args:
        scores: Scores (C, h, w) of patches, interpolated bilinearly.
        size: Height and width in pixels, S.
    """
    dense = F.interpolate(scores[None], (size, size), mode="bilinear", align_corners=False)
    return dense[0].argmax(dim=0)
