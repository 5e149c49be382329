"""Methods whose targets are nearest neighbors among the projections of earlier images.

Dwibedi et al., With a Little Help from My Friends, ICCV 2021, arXiv:2104.14548.

V: views, B: images per rank, D: width of the projector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from selftask.config.fields import setting
from selftask.methods.base import Method, Task
from selftask.models.feature_queue import FeatureQueue
from selftask.models.precision import to_float32


class NeighborTargets(Method):
    """Method with a queue of projections, in which ``nearest`` searches the targets of a batch."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(256, min=1, tiny=16)
        """Width of the output of projector and predictor, D."""
        queue_size: int = setting(0, min=0)
        """Length of the queue, in images. The nearest neighbors of projections in it replace the
        projections as targets; 0: no neighbors.
        """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        size, dim = config.queue_size, config.out_dim
        self.queue = FeatureQueue(size, dim) if size else None

    def nearest(self, projection: Tensor, task: Task) -> Tensor:
        """Return the nearest entries of the queue, unit vectors (V, B, D), without gradient.

        In training, projections of the first view are enqueued after the step. Without a queue,
        return ``projection``, detached.

        Args:
            projection: (V, B, D), not necessarily normalized.
            task: The task.
        """
        projection = projection.detach()
        if self.queue is None:
            return projection
        units = F.normalize(to_float32(projection), dim=2)
        if task.train:
            self.pending.append(units[0])
        return self.queue.nearest(units)

    def on_update(self, task: Task) -> None:
        super().on_update(task)
        for units in self.take_pending():
            assert self.queue is not None
            self.queue.update(units)
