"""Supervised learning with several labels per image, each of which is 1, 0 or -1 (unknown).

B: images per rank, C: labels of an image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.base import Task
from selftask.methods.families.classification import Classification
from selftask.models.precision import to_float32
from selftask.registry import register_method


@register_method("multilabel")
class Multilabel(Classification):
    """Classification with several labels per image: binary cross-entropy.

    Loss: ``-y ln sigmoid(s) - (1 - y) ln sigmoid(-s)`` of scores s and known labels y.

    Use it as a supervised reference if images have several labels each.
    """

    requires = ("numbers",)

    @dataclass(frozen=True, kw_only=True)
    class Config(Classification.Config):
        targets: list[str] = setting(missing="name the labels, which are columns of data.numbers")
        """Names of ``data.numbers`` to predict, one per label."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            yield from super().problems(config)
            if not self.targets:
                yield "targets: at least one column of data.numbers is expected"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.num_classes = len(config.targets)
        self.label_shape = (1, self.num_classes)

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Set the input, and ``batch.labels`` (B, C) of 1, 0 and -1."""
        super().prepare_batch(batch, task)
        batch.labels = torch.stack([batch.extras[name] for name in self.config.targets], dim=1)

    def score_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return known_cross_entropy(scores, labels)

    @property
    def chance_loss(self) -> float:
        """Binary cross-entropy of equal scores: ln 2, times the sum of the heads' weights."""
        return self.total_weight * math.log(2)


def known_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the binary cross-entropy: a mean over known labels of an image, then over images.

    An image without known labels counts as 0.

    Args:
        scores: (B, C).
        labels: (B, C): 1, 0, or -1 to be ignored.
    """
    scores = to_float32(scores)
    is_known = (labels >= 0).to(scores.dtype)
    losses = F.binary_cross_entropy_with_logits(
        scores, labels.clamp(min=0).to(scores.dtype), weight=is_known, reduction="none"
    )
    return (losses.sum(dim=1) / is_known.sum(dim=1).clamp(min=1)).mean()
