"""Jigsaw: predict the permutation of an image's tiles.

B: images per rank, T: tiles of an image, P: permutations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema import num_views, total_views
from selftask.data.transforms.pretext import permutations
from selftask.methods.base import Task
from selftask.methods.families.pretext import TilesPretext
from selftask.random.keyed import uniform
from selftask.registry import register_method


@register_method("jigsaw")
class Jigsaw(TilesPretext):
    """Jigsaw (arXiv:1603.09246): predicts in which order the tiles of an image are shown.

    Loss: ``-log softmax(s)[permutation]`` of the scores s for shuffled tiles.

    Use it as a baseline, or with images whose layout is the content.

    Differs from the authors' code:

    * Each new permutation maximizes the smallest Hamming distance to those already chosen; in the
      authors' code, the mean distance.
    * Tiles are normalized by the statistics of the data set, not by their own.
    """

    paper = (
        "Noroozi and Favaro, Unsupervised Learning of Visual Representations by Solving Jigsaw "
        "Puzzles, ECCV 2016"
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        num_permutations: int = setting(1000, min=2, max=10_000, tiny=8)
        """Number of permutations, the classes, P."""
        tile_dim: int = setting(512, min=1, tiny=16)
        """Width of the layer that is applied to each tile."""
        hidden_dim: int = setting(4096, min=1, tiny=32)
        """Width of the hidden layer of the classifier."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            num_tiles = total_views(config["views"])
            if self.num_permutations > (most := math.factorial(num_tiles)):
                yield (
                    f"num_permutations: {self.num_permutations}; {num_tiles} tiles have {most} "
                    "permutations"
                )

    orders: Tensor
    """The permutations, int64 (P, T)."""

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        self.num_classes = self.config.num_permutations
        self.num_tiles = num_views(task.config.views)["tiles"]
        orders = torch.from_numpy(permutations(self.num_tiles, self.num_classes)).long()
        self.register_buffer("orders", orders)
        return super().build_network(backbone, task)

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build a layer that is applied to each tile, and a classifier of all tiles together."""
        config = self.config
        return nn.Sequential(
            nn.Linear(embed_dim, config.tile_dim),
            nn.ReLU(),
            nn.Flatten(),  # (B, T * tile_dim)
            nn.Linear(self.num_tiles * config.tile_dim, config.hidden_dim),
            nn.ReLU(),
            nn.Linear(config.hidden_dim, self.num_classes),
        )

    def arrange(self, batch: Batch, task: Task) -> tuple[Tensor, Tensor]:
        """Draw a permutation for each image: tiles (B, 1, T) and classes (B, 1)."""
        key = batch.key.to(self.orders.device, non_blocking=True)
        draws = uniform(task.config.train.seed, key, 1)
        classes = (draws * self.num_classes).long()  # (B, 1)
        return self.orders[classes], classes
