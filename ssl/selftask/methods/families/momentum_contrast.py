"""Contrast of queries with a teacher's keys; negatives are a queue of older keys (MoCo).

V: queries per image, B: images per rank, D: width of the head, K: length of the queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.config.fields import setting
from selftask.distributed.collectives import world_size
from selftask.methods.base import Method, NumViews, Task
from selftask.models.feature_queue import FeatureQueue
from selftask.models.heads import mlp
from selftask.models.losses.contrast import shuffle_bn, unshuffle_bn
from selftask.models.precision import to_float32
from selftask.models.teacher import Teacher
from selftask.random.keyed import LAYER_DRAWS


class MomentumKeys(Method):
    """Method with MoCo's head and keys of a teacher; combine it with ``EMATeacher``."""

    views: ClassVar[NumViews | dict[str, NumViews]] = 2
    teacher: Teacher

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(128, min=1, tiny=16)
        """Width of the head's output, D."""
        hidden_dim: int | None = setting(None, min=1, tiny=32)
        """Width of the head's hidden layer; null: the width of the backbone."""
        temperature: float = setting(0.2, above=0)
        """Temperature of the similarities, tau; 0.07 in MoCo v1."""

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build the two-layer head of MoCo v2, without BatchNorm."""
        return mlp(embed_dim, self.config.hidden_dim or embed_dim, self.config.out_dim, norm=False)

    @torch.no_grad()
    def shuffled_teacher(self, views: list[Tensor]) -> Any:
        """Exchange views between ranks by ``shuffle_bn``, and return the teacher's output for them.

        Every rank must call this method. Apply ``unshuffle_bn`` to an output (B, ...) to get the
        rows of this rank's own images. With several ranks, ``embedding`` of the teacher's network
        becomes None.
        """
        exchanged = [shuffle_bn(view) for view in views]
        with LAYER_DRAWS.exchanged(shuffle_bn):
            output = self.teacher(exchanged)
        if world_size() > 1:
            network: Any = self.teacher.network
            network.embedding = None  # of images of other ranks
        return output

    @torch.no_grad()
    def unit_keys(self, views: list[Tensor]) -> Tensor:
        """Return the teacher's outputs for views, (V, B, D), of unit length."""
        keys = self.shuffled_teacher(views)
        return torch.stack([unshuffle_bn(F.normalize(to_float32(key), dim=1)) for key in keys])


class MomentumContrast(MomentumKeys):
    """Method whose negatives are queues of older keys.

    ``on_forward`` of a subclass appends the keys of a batch to ``pending``, a tuple with one tensor
    for each of ``queues()``. They are enqueued after the step.
    """

    # negatives come from the queue
    loss_reduction: ClassVar[Literal["samples", "gathered", "statistics"]] = "samples"
    queue: FeatureQueue

    @dataclass(frozen=True, kw_only=True)
    class Config(MomentumKeys.Config):
        queue_size: int = setting(65_536, min=1, tiny=lambda batch: 2 * batch)
        """Length of a queue, in keys; K."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            train = config["train"]
            keys = train["batch_size"] * train["accumulate"]
            if self.queue_size < keys:
                yield (
                    f"queue_size: {self.queue_size} is less than the {keys} keys of one step "
                    "(train.batch_size * train.accumulate)"
                )

    def queues(self) -> tuple[FeatureQueue, ...]:
        """Return the queues, in the order of the rows in ``pending``: ``self.queue`` by default."""
        return (self.queue,)

    def on_update(self, task: Task) -> None:
        """Update the teacher, then replace the oldest keys with those of this step."""
        super().on_update(task)
        for item in self.take_pending():
            self.enqueue(*item)

    def enqueue(self, *keys: Tensor) -> None:
        """Replace the oldest keys of each queue by those of one batch, gathered from all ranks.

        Every rank must call this method.

        Args:
            keys: A tensor for each of ``queues()``: (B, D), or (B, V, D) if its entries are (V, D).
        """
        for queue, rows in zip(self.queues(), keys, strict=True):
            queue.update(rows)

    @property
    def chance_loss(self) -> float:
        """Loss of equal similarities: ln(1 + ``queue_size``)."""
        return math.log(1 + self.config.queue_size)
