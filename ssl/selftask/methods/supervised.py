"""Supervised learning of a classifier on a trained or frozen backbone (linear probe).

C: classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from selftask import classy
from selftask.config.fields import setting
from selftask.data.data_module import val_key
from selftask.errors import UserError, nearest
from selftask.methods.base import Task
from selftask.methods.families.classification import Classification
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("supervised")
class Supervised(Classification):
    """Classification: cross-entropy with labels, or any loss of torch.nn or Classy Vision.

    With ``heads`` there are several classifiers; their weighted losses are the terms of the loss.

    Loss: ``-ln softmax(s)[label]`` of scores s, or any loss by name.

    Use it as the supervised reference, and to fine-tune.

    Differs from the authors' code:

    * The ImageNet recipe has a cosine schedule instead of steps.
    """

    requires = ("labels",)

    @dataclass(frozen=True, kw_only=True)
    class Config(Classification.Config):
        num_classes: int | None = setting(None, min=1)
        """Number of classes, C; null: the number of classes of the data."""
        loss: str = "CrossEntropyLoss"
        """Loss of torch.nn, ``classy:NAME``, or the bare name of one that your own module has
        registered with Classy Vision."""
        loss_args: dict[str, Any] = field(default_factory=dict)
        """Keyword arguments of the loss."""

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Build the classifier.

        Raises:
            UserError: If the number of classes is unknown or too small for the labels, or if the
                loss is unknown or its arguments do not fit.
        """
        self.num_classes = self.config.num_classes or task.data_module.num_classes
        if not self.num_classes:
            raise UserError(
                "method.num_classes is missing: the labels of these images are not known before "
                "they are read"
            )
        _check_labels("data", task.data_module.train_source, self.num_classes)
        for name, source in task.data_module.val_sources.items():
            _check_labels(val_key(name), source, self.num_classes)
        self.loss = _build_loss(self.config.loss, self.config.loss_args)
        return super().build_network(backbone, task)

    @in_full_precision
    def score_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return self.loss.forward(scores, labels)

    @property
    def chance_loss(self) -> float | None:
        """Cross-entropy of equal scores: ln(classes), times the sum of the heads' weights.

        None with another ``loss``.
        """
        is_entropy = self.config.loss == "CrossEntropyLoss"
        return self.total_weight * math.log(self.num_classes) if is_entropy else None


def _check_labels(key: str, source: Any, num_classes: int) -> None:
    """Raise UserError for a known label outside the classifier's classes."""
    labels = None if source is None else source.labels
    high = -1 if labels is None else int(labels.max(initial=-1))
    if high >= num_classes:
        raise UserError(
            f"{key}: its labels go up to {high}, and the classifier has {num_classes} classes; "
            f"set method.num_classes to at least {high + 1}"
        )


def _build_loss(name: str, args: dict[str, Any]) -> nn.Module:
    names = [loss for loss in nn.modules.loss.__all__ if loss.endswith("Loss")]
    if name.startswith("classy:") or (name not in names and classy.has("loss", name)):
        return classy.build("loss", name, args)
    if name not in names:
        raise UserError(
            f"method.loss={name!r} is not a loss of torch.nn; {nearest(name, names)}; Classy "
            "Vision's are written classy:NAME"
        )
    try:
        built: nn.Module = getattr(nn, name)(**args)
    except TypeError as error:
        raise UserError(f"method.loss_args={args} do not fit {name}: {error}") from error
    return built
