"""Methods that need the pixels of their views before ``normalize``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from selftask.data.transforms.normalize import moments_of
from selftask.errors import UserError
from selftask.methods.base import Method, Task
from selftask.models.features.extract import adapter_of


class ViewPixels(Method):
    """Method that undoes the normalization of its views: ``views * std + mean`` is in [0, 1]."""

    mean: Tensor  # (C, 1, 1), of the normalization of the first group of views
    std: Tensor

    def read_moments(self, task: Task) -> None:
        """Set ``mean`` and ``std``; raise UserError if the views are not normalized by channel."""
        channels = task.data_module.channels
        group = next(group for group in task.config.views.values() if group.count)
        moments = moments_of([part.to_dict() for part in group.transforms], channels)
        if moments is None:
            raise UserError(
                f"views: {task.config.method.name} undoes the normalization of the views; end the "
                "transforms by normalize. A Learner has no transforms: use selftask.train"
            )
        for name, values in zip(("mean", "std"), moments, strict=True):
            self.register_buffer(name, torch.tensor(values)[:, None, None], persistent=False)


def require_stride(backbone: nn.Module, predicted: str) -> None:
    """Raise UserError if the stride of the backbone's feature map is not known.

    Args:
        backbone: A backbone with feature maps.
        predicted: What the method predicts from the map, for the message.
    """
    if not adapter_of(backbone).stride:
        raise UserError(
            f"backbone: {predicted} are predicted from a feature map, and the stride of that of a "
            f"{type(backbone).__name__} is not known; take a ResNet, ConvNeXt or ViT"
        )
