"""Relative location: predict the position of a tile relative to the tile in the center.

B: images per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.base import Task
from selftask.methods.families.pretext import TilesPretext
from selftask.registry import register_method

CENTER = 4  # index of the center among 3 x 3 tiles, row by row


@register_method("relative_location")
class RelativeLocation(TilesPretext):
    """Context prediction (arXiv:1505.05192): predicts where a tile lies relative to the center.

    Loss: ``-log softmax(s)[neighbor]`` of the scores s of the eight neighbors.

    Use it as a baseline.

    Differs from the authors' code:

    * All eight neighbors of a center tile are predicted, as in mmselfsup; in the authors' code, one
      pair at a time.
    * The classifier has no dropout.
    """

    paper = (
        "Doersch et al., Unsupervised Visual Representation Learning by Context Prediction, "
        "ICCV 2015"
    )
    views = {"tiles": 9}
    num_classes = 8

    @dataclass(frozen=True, kw_only=True)
    class Config:
        hidden_dim: int = setting(4096, min=1, tiny=32)
        """Width of the hidden layer of the classifier."""

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build a classifier of pairs of tiles, with one hidden layer."""
        hidden = self.config.hidden_dim
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(2 * embed_dim, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, self.num_classes),
        )

    def arrange(self, batch: Batch, task: Task) -> tuple[Tensor, Tensor]:
        """Pair the center with each neighbor, row by row: tiles (B, 8, 2) and classes (B, 8)."""
        (tile, *_) = batch.views["tiles"]
        classes = torch.arange(self.num_classes, device=tile.device)
        neighbors = classes + (classes >= CENTER)
        pairs = torch.stack([torch.full_like(neighbors, CENTER), neighbors], dim=1)  # (8, 2)
        return pairs.expand(len(tile), -1, -1), classes.expand(len(tile), -1)
