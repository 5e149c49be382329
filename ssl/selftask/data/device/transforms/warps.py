"""Batched perspective and elastic distortion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from torch import Tensor

from selftask.data.device.operation import Arrays, Images, Operation, Tensors, on_chosen
from selftask.data.device.transforms.geometry import pixel_centres, read_at
from selftask.data.transforms.warps import Elastic, RandomPerspective, corners_of
from selftask.random.views import replayed
from selftask.registry import register_batched_transform

if TYPE_CHECKING:
    from selftask.random.views import Streams

_STAYS = np.eye(3)


@register_batched_transform("random_perspective")
class BatchedPerspective(Operation):
    """Random perspective."""

    transform: RandomPerspective

    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> Arrays:
        height, width = sizes[0].tolist()
        ends = corners_of(height, width)
        matrix = [
            _STAYS if one is None else cv2.getPerspectiveTransform(one.astype(np.float32), ends)
            for one in params
        ]
        chosen = np.array([one is not None for one in params])
        return {"matrix": np.array(matrix), "chosen": chosen}

    def draw(self, streams: Streams, sizes: np.ndarray) -> Arrays:
        return self.pack(replayed(self.transform, streams.random(9), sizes), sizes)

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        return on_chosen(images, packed["chosen"], self._change, packed["matrix"])

    def _change(self, values: Tensor, matrix: Tensor) -> Tensor:
        x, y = pixel_centres(values)
        of_x, of_y, constant = matrix[..., None].unbind(2)  # (B, 3, 1) each
        places = (of_x * x + constant)[:, :, None] + (of_y * y)[..., None]
        at_x, at_y, scale = places.unbind(1)  # (B, H, W) each
        return read_at(values, at_x / scale, at_y / scale, self.transform)


@register_batched_transform("elastic")
class BatchedElastic(Operation):
    """Elastic distortion; workers draw the displacements and put them into the batch."""

    vectorised = False
    transform: Elastic

    def pack(self, params: Sequence[Any], sizes: np.ndarray) -> Arrays:
        by = np.zeros((len(params), 2, *sizes[0]), dtype=np.float32)
        for place, one in zip(by, params, strict=True):
            if one is not None:
                place[:] = one
        return {"by": by, "chosen": np.array([one is not None for one in params])}

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        return on_chosen(images, packed["chosen"], self._change, packed["by"])

    def _change(self, values: Tensor, by: Tensor) -> Tensor:
        x, y = pixel_centres(values)
        return read_at(values, x + by[:, 0], y[:, None] + by[:, 1], self.transform)
