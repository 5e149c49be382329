"""MoCo v2: contrast a query and its key with a queue of older keys.

Chen et al., Improved Baselines with Momentum Contrastive Learning, arXiv:2003.04297; v1 is He et
al., Momentum Contrast for Unsupervised Visual Representation Learning, CVPR 2020,
arXiv:1911.05722. Equation and section numbers refer to v1.

B: images per rank, W: ranks, V: queries per image (1, or 2 if symmetric), D: width of the head,
K: length of the queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.base import Method
from selftask.models.feature_queue import FeatureQueue
from selftask.models.heads import mlp
from selftask.models.losses.contrast import info_nce, shuffle_bn, unshuffle_bn
from selftask.models.precision import to_float32
from selftask.models.teacher import Teacher
from selftask.optim.schedules import build_schedule
from selftask.random.keyed import LAYER_DRAWS
from selftask.registry import register_method

if TYPE_CHECKING:
    from selftask.task import Task


@register_method("moco")
class MoCo(Method):
    """MoCo v2 (arXiv:2003.04297): contrast with an EMA teacher's keys in a queue."""

    loss_reduction = "samples"
    views = 2

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(128, min=1, tiny=16)
        """Width of the head's output, D."""
        hidden_dim: int | None = setting(None, min=1, tiny=32)
        """Width of the head's hidden layer; null: that of the backbone."""
        queue_size: int = setting(65_536, min=1, tiny=lambda batch: 2 * batch)
        """Length of the queue, in keys; K."""
        temperature: float = 0.2
        """Temperature of the similarities, tau in eq. 1; v1 has 0.07."""
        momentum: float | dict[str, Any] = setting(0.999, of="schedules", min=0, max=1)
        """Momentum of the teacher, m in eq. 2."""
        symmetric: bool = False
        """Whether both views are queries, each with its own queue (v2+)."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if self.temperature <= 0:
                yield f"temperature: {self.temperature}; above 0 is expected, such as 0.2"
            train = config["train"]
            keys = train["batch_size"] * train["accumulate"]
            if self.queue_size < keys:
                yield (
                    f"queue_size: {self.queue_size} is less than the {keys} keys of one step "
                    "(train.batch_size * train.accumulate)"
                )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.num_queries = 2 if config.symmetric else 1  # V
        self.queue = FeatureQueue(config.queue_size, self.num_queries, config.out_dim)
        self.pending: list[Tensor] = []  # keys (V, B, D) of each batch of this step

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build the two-layer head of v2, without BatchNorm."""
        return mlp(embed_dim, self.config.hidden_dim or embed_dim, self.config.out_dim, norm=False)

    def setup(self, task: Task) -> None:
        self.teacher = Teacher(task.base_model)
        self.momentum_at = build_schedule(self.config.momentum, task.length)

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Use view v as query v; its key is the other view."""
        batch.input = batch.all_views[: self.num_queries]

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Compute the keys of the batch, which are enqueued after the step."""
        batch = task.last_batch
        others = [shuffle_bn(view) for view in batch.all_views[::-1][: self.num_queries]]
        with LAYER_DRAWS.exchanged(shuffle_bn):
            keys = F.normalize(to_float32(self.teacher(others)), dim=2)  # (V, B, D)
        batch["keys"] = torch.stack([unshuffle_bn(key) for key in keys])  # (V, B, D)
        if task.train:
            self.pending.append(batch["keys"])

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return eq. 1 averaged over queries; ``output`` (V, B, D)."""
        queue = self.queue.rows.transpose(0, 1)  # (V, K, D)
        return info_nce(output, batch["keys"], queue, temperature=self.config.temperature)

    @property
    def chance_loss(self) -> float:
        """Loss if all similarities are equal: the key is one of 1 + K."""
        return math.log(1 + self.config.queue_size)

    @torch.no_grad()
    def on_update(self, task: Task) -> None:
        """Update the teacher (eq. 2), then replace the oldest keys by those of this step."""
        self.teacher.update(task.base_model, momentum=self.momentum_at(task.where))
        for keys in self.pending:
            self.queue.update(keys.transpose(0, 1))
        self.pending.clear()
