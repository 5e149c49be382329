"""Supervised learning: a classifier on the backbone; on a frozen one, the linear probe.

B: images per rank, E: features of the backbone, C: classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selftask import classy
from selftask.errors import UserError, nearest
from selftask.methods.base import Method
from selftask.models.build import embed_dim
from selftask.registry import register_method

if TYPE_CHECKING:
    from selftask.task import Task


@register_method("supervised")
class Supervised(Method):
    """Cross-entropy, or any loss of torch.nn or Classy Vision by its name; one view."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        num_classes: int | None = None  # C; None: as many as the data set has
        freeze_backbone: bool = False  # the linear probe: only the classifier is trained
        loss: str = "CrossEntropyLoss"  # of torch.nn, or classy:NAME
        loss_args: dict[str, Any] = field(default_factory=dict)

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        self.num_classes = self.config.num_classes or task.feed.num_classes
        if not self.num_classes:
            raise UserError("method.name=supervised needs labels, and the data set has none")
        self.loss = _build_loss(self.config.loss, self.config.loss_args)
        return Classifier(backbone, self.num_classes, frozen=self.config.freeze_backbone)

    def prepare(self, sample: dict[str, Any], task: Task) -> None:
        sample["input"] = sample["views"][0]

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of the scores ``output`` (B, C) for the labels ``target`` (B,)."""
        loss: Tensor = self.loss(output.float(), target)
        return loss

    @property
    def chance(self) -> float | None:
        """Cross-entropy of equal scores."""
        return math.log(self.num_classes) if self.config.loss == "CrossEntropyLoss" else None


class Classifier(nn.Module):
    """``head(backbone(images))``; a frozen backbone stays in eval mode and gets no gradient."""

    def __init__(self, backbone: nn.Module, num_classes: int, *, frozen: bool) -> None:
        super().__init__()
        self.frozen = frozen
        self.backbone = backbone.requires_grad_(not frozen)
        self.head = nn.Linear(embed_dim(backbone), num_classes)

    def forward(self, images: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            features = self.backbone(images)  # (B, E)
        scores: Tensor = self.head(features)  # (B, C)
        return scores

    def train(self, mode: bool = True) -> Classifier:
        super().train(mode)
        self.backbone.train(mode and not self.frozen)
        return self


def _build_loss(name: str, args: dict[str, Any]) -> nn.Module:
    if name.startswith("classy:"):
        loss: nn.Module = classy.build("loss", name, args)
        return loss
    known = [loss for loss in nn.modules.loss.__all__ if loss.endswith("Loss")]
    if name not in known:
        raise UserError(f"method.loss={name!r} is no loss of torch.nn; {nearest(name, known)}")
    built: nn.Module = getattr(nn, name)(**args)
    return built
