"""Methods that compare the views of an image with the views of all other images of the batch.

D: width of the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from selftask.config.fields import setting
from selftask.config.schema import num_views
from selftask.methods.base import Method, NumViews, Task
from selftask.models.heads import mlp


class BatchContrast(Method):
    """Method with SimCLR's head (arXiv:2002.05709, section 2.1) and negatives from the batch."""

    loss_reduction = "gathered"  # views are negatives to those of all ranks
    views: ClassVar[NumViews | dict[str, NumViews]] = 2
    min_batch_size = 2

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(128, min=1, tiny=16)
        """Width of the head's output, D."""
        hidden_dim: int | None = setting(None, min=1, tiny=32)
        """Width of the head's hidden layer; null: the width of the backbone."""
        norm: bool = True
        """Whether both layers of the head have BatchNorm, as in SimCLR's code."""

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build a head of two layers. A last BatchNorm has no shift, as in SimCLR's code."""
        norm = self.config.norm
        head = mlp(
            embed_dim,
            self.config.hidden_dim or embed_dim,
            self.config.out_dim,
            norm=norm,
            last_norm=norm,
            bias=not norm,
            last_bias=not norm,
        )
        if norm:
            head[-1].bias.requires_grad_(False)  # stays 0
        return head

    def setup(self, task: Task) -> None:
        super().setup(task)
        views = sum(num_views(task.config.views).values())
        self.num_negatives = views * (task.length.batch_size - 1)
