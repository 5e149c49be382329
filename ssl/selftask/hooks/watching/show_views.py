"""Images of the views, for writers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from selftask.config.fields import setting
from selftask.hooks.base import Task
from selftask.hooks.writers.media import MediaHook
from selftask.registry import register_hook


@register_hook("show_views")
@dataclass(eq=False, kw_only=True)
class ShowViews(MediaHook):
    """Sends the views of some images to writers, as ``views/GROUP``, with a column per image.

    Groups whose views do not have 1 or 3 channels are omitted. Without a writer that takes images
    (``tensorboard``, ``wandb``, ``mlflow``), the hook does nothing.
    """

    priority: ClassVar[int] = 55
    images: int = setting(8, min=1)
    """Number of images, the first of rank 0's batch."""

    def on_update(self, task: Task) -> None:
        if not self.is_due(task):
            return
        for group, views in task.last_batch.views.items():
            if views[0].shape[1] in (1, 3):
                task.log_image(f"views/{group}", mosaic([view[: self.images] for view in views]))


def mosaic(views: list[Tensor]) -> Tensor:
    """Return one image of all views of B images, each (B, C, H, W), scaled to the range 0 to 1.

    Shape:
        (C, V * H, B * W): a row for each view, a column for each image.
    """
    rows = torch.stack(views).float()  # (V, B, C, H, W)
    low, high = rows.amin(), rows.amax()
    scaled = (rows - low) / (high - low).clamp(min=1e-12)
    return scaled.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
