"""SimCLR: match two views of an image among all views of the batch.

Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020,
arXiv:2002.05709.

B: images per rank, W: ranks, D: width of the head.
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
from selftask.distributed.collectives import gather_cat_with_grad, rank
from selftask.methods.base import Method
from selftask.models.heads import mlp
from selftask.models.precision import in_full_precision
from selftask.registry import register_method

if TYPE_CHECKING:
    from selftask.task import Task


@register_method("simclr")
class SimCLR(Method):
    """In-batch negatives, gathered over ranks with gradient; no state."""

    loss_reduction = "gathered"  # views are negatives to those of all ranks
    views = 2

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(128, min=1, tiny=16)  # D
        # width of the head's hidden layer; None: the backbone's
        hidden_dim: int | None = setting(None, min=1, tiny=32)
        norm: bool = True  # BatchNorm after both layers of the head, as in the paper's code
        temperature: float = 0.1  # tau in eq. 1; 0.5 for CIFAR-10 in the paper, 0.2 in solo-learn
        scale: float = setting(1.0, above=0)  # of the whole loss; 2 in the paper's code, which
        # sums both directions

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if self.temperature <= 0:
                yield f"temperature: {self.temperature}; above 0 is expected, such as 0.1"
            if config["train"]["batch_size"] < 2:
                yield "train.batch_size: 1; the negatives are other images: at least 2 are needed"

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build g of section 2.1. The last BatchNorm has no shift, as in the paper's code."""
        norm = self.config.norm
        hidden = self.config.hidden_dim or embed_dim
        bias = not norm
        head = mlp(
            embed_dim,
            hidden,
            self.config.out_dim,
            norm=norm,
            last_norm=norm,
            bias=bias,
            last_bias=bias,
        )
        if norm:
            head[-1].bias.requires_grad_(False)  # stays 0
        return head

    def setup(self, task: Task) -> None:
        self.num_rows = 2 * task.length.batch_size  # 2BW

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return eq. 1 averaged over both views; ``output`` (2, B, D)."""
        loss = info_nce(output[0], output[1], temperature=self.config.temperature)
        return self.config.scale * loss

    @property
    def chance_loss(self) -> float:
        """Loss if all similarities are equal: the positive is one of the 2BW - 1 other views."""
        return self.config.scale * math.log(self.num_rows - 1)


@in_full_precision
def info_nce(first: Tensor, second: Tensor, *, temperature: float) -> Tensor:
    """NT-Xent of this rank's 2B rows against the 2BW of all ranks.

    A row is not its own negative: its similarity to itself is left out of the denominator.

    Args:
        first: (B, D), of any length.
        second: (B, D), of any length.
        temperature: tau.
    """
    first, second = F.normalize(first, dim=1), F.normalize(second, dim=1)
    local = torch.cat([first, second])  # (2B, D)
    everyone = torch.cat([gather_cat_with_grad(first), gather_cat_with_grad(second)])  # (2BW, D)
    logits = local @ everyone.T / temperature  # (2B, 2BW)
    num_images = len(everyone) // 2  # B * W
    place = torch.arange(len(first), device=local.device) + rank() * len(first)  # (B,)
    own = torch.cat([place, place + num_images])  # column of each row's own view
    other = torch.cat([place + num_images, place])  # column of its positive
    logits = logits.scatter(1, own[:, None], -torch.inf)
    return F.cross_entropy(logits, other)
