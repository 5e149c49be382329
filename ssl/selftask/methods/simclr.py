"""SimCLR: two views of an image must find each other among all views of the batch.

Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020,
arXiv:2002.05709.

B: images per rank, W: ranks, D: width of the head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.collectives import gather_cat_with_grad, rank, world_size
from selftask.methods.base import Method, full_precision
from selftask.models.heads import mlp
from selftask.registry import register_method


@register_method("simclr")
class SimCLR(Method):
    """In-batch negatives, gathered over ranks with gradient; no state."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        dim: int = 128  # D
        hidden: int | None = None  # width of the head's hidden layer; None: the backbone's
        norm: bool = True  # BatchNorm in the head, as in the paper's code
        temperature: float = 0.1  # tau in eq. 1; 0.5 for CIFAR-10 in the paper, 0.2 in solo-learn

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            num_views = sum(group["count"] for group in config["views"].values())
            if num_views != 2:
                yield f"views: simclr compares two views, got {num_views}"

    def build_head(self, embed_dim: int) -> nn.Module:
        hidden = self.config.hidden or embed_dim
        return mlp(embed_dim, hidden, self.config.dim, norm=self.config.norm)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Eq. 1 averaged over both views; ``output`` (2, B, D)."""
        first, second = F.normalize(full_precision(output), dim=2)  # (B, D) each
        self.num_rows = 2 * len(first) * world_size()
        return info_nce(first, second, temperature=self.config.temperature)

    @property
    def chance(self) -> float | None:
        """All similarities equal: the positive is one of the 2BW - 1 other views."""
        num_rows = getattr(self, "num_rows", None)
        return math.log(num_rows - 1) if num_rows else None


def info_nce(first: Tensor, second: Tensor, *, temperature: float) -> Tensor:
    """NT-Xent of this rank's 2B rows against the 2BW of all ranks; unit-length rows (B, D).

    An image is never its own negative: its similarity to itself is left out of the denominator.
    """
    local = torch.cat([first, second])  # (2B, D)
    everyone = torch.cat([gather_cat_with_grad(first), gather_cat_with_grad(second)])  # (2BW, D)
    logits = local @ everyone.T / temperature  # (2B, 2BW)
    num_images = len(everyone) // 2  # B * W
    place = torch.arange(len(first), device=local.device) + rank() * len(first)  # (B,)
    own = torch.cat([place, place + num_images])  # column of each row's own view
    other = torch.cat([place + num_images, place])  # column of its positive
    logits = logits.scatter(1, own[:, None], -torch.inf)
    return F.cross_entropy(logits, other)
