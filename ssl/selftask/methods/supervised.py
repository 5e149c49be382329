"""Supervised learning of a classifier on a trained or frozen backbone (linear probe).

B: images per rank, E: features of the backbone, C: classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask import classy
from selftask.batch import Batch, Loss
from selftask.config.fields import setting
from selftask.config.schema import total_views
from selftask.data.data_module import val_key
from selftask.errors import UserError, nearest, plural
from selftask.meters.accuracy import Accuracy
from selftask.methods.base import Method
from selftask.models.build import embed_dim
from selftask.models.classifier.classifier import Classifier, Heads, build_chain, takes_tokens
from selftask.models.features.extract import offers
from selftask.models.precision import in_full_precision
from selftask.models.weights.load import load_part
from selftask.models.weights.read import weights_at
from selftask.models.weights.trained import Scores
from selftask.registry import register_method

if TYPE_CHECKING:
    from selftask.task import Task


@register_method("supervised")
class Supervised(Method):
    """Classification with cross-entropy, or any loss of torch.nn or Classy Vision by name.

    The network gets one view of an image, or several if the head begins with ``concat_views``.

    With ``targets`` an image has several labels, each of which is 1, 0, or -1 if unknown. The loss
    is then the binary cross-entropy, averaged over the known labels of each image.

    With ``heads`` there are several classifiers; their weighted losses are the terms of the loss.
    """

    loss_reduction = "samples"
    sample_dim = 0
    views = (1, None)
    requires = ("labels",)
    outputs_logits = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        num_classes: int | None = setting(None, min=1)
        """Number of classes, C; null: that of the data set."""
        freeze_backbone: bool = False
        """Whether only the classifier is trained (linear probe)."""
        head: list[Any] = setting([], of="head_blocks")
        """Blocks of the classifier, applied in order; empty: one linear layer."""
        heads: dict[str, list[Any]] = setting({}, of="head_blocks")
        """Several classifiers by name, each a list of blocks; meters use the first by default."""
        head_weights: dict[str, float] = setting({}, min=0)
        """Weights of the losses of ``heads``; 1 for heads without an entry."""
        targets: list[str] = setting([])
        """Names of ``data.numbers`` to predict, one per label; empty: predict the class."""
        loss: str = "CrossEntropyLoss"
        """Loss of torch.nn, ``classy:NAME``, or the bare name of one that your own module has
        registered with Classy Vision."""
        loss_args: dict[str, Any] = field(default_factory=dict)
        """Keyword arguments of the loss."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if self.targets and (self.loss != "CrossEntropyLoss" or self.num_classes):
                yield "targets: they have a loss and a number of classes of their own; leave both"
            made = total_views(config["views"])
            for blocks in self.heads.values() or [self.head]:
                wanted = blocks[0].get("num_views", 1) if blocks else 1
                if made != wanted:
                    hint = f", or a head of [{{name: concat_views, num_views: {made}}}, linear]"
                    yield (
                        f"views: supervised needs {wanted} {plural('view', wanted)} of an image, "
                        f"got {made}; give as many{hint if wanted == 1 else ''}"
                    )
            if self.head and self.heads:
                yield "heads: there is method.head, too; put it among them under a name"
            for name in self.heads:
                if not self.heads[name]:
                    yield f"heads.{name}: a list of blocks is expected, such as [linear]"
            for name in self.head_weights:
                if name not in self.heads:
                    known = ", ".join(self.heads) or "there are none"
                    yield f"head_weights.{name}: no such head in method.heads; {known}"
            step = config["train"]["step"]
            if self.heads and (step if isinstance(step, str) else step["name"]) == "grad_cache":
                yield "heads: train.step=grad_cache divides one output; take another train step"

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Build the classifier. Raise UserError if the labels or the loss do not match."""
        if self.config.targets:
            self.num_classes, self._score = len(self.config.targets), known_cross_entropy
            return self._classifier(backbone)
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
        self._score = in_full_precision(self.loss.forward)  # once, not at every step
        return self._classifier(backbone)

    def _classifier(self, backbone: nn.Module) -> Classifier:
        frozen = self.config.freeze_backbone
        head = self.build_chains(embed_dim(backbone), self.num_classes)
        if head is not None and takes_tokens(head) and "dense" not in offers(backbone):
            raise UserError(
                "method.head: pooled_tokens needs patch tokens, and this backbone gives pooled "
                "features only"
            )
        return Classifier(backbone, self.num_classes, frozen=frozen, head=head)

    def build_chains(self, width: int, num_classes: int) -> nn.Module | None:
        """Return the configured head or heads, or None for one linear layer.

        Args:
            width: Number of features of the backbone, E.
            num_classes: Number of outputs of each head, C.
        """
        config = self.config
        if config.head:
            return build_chain(config.head, width, num_classes, "method.head")
        if not config.heads:
            return None
        return Heads(
            {
                name: build_chain(blocks, width, num_classes, f"method.heads.{name}")
                for name, blocks in config.heads.items()
            }
        )

    def on_start(self, task: Task) -> None:
        """Raise UserError if a meter needs more classes, before the first test phase."""
        for meter in task.meters if task.has_test_phases else ():
            if isinstance(meter, Accuracy):
                labels = (1, self.num_classes) if self.config.targets else (1,)
                meter.validate((1, self.num_classes), labels)

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        views = batch.all_views
        batch.input = views[0] if len(views) == 1 else views
        if self.config.targets:
            batch.labels = torch.stack([batch.extras[name] for name in self.config.targets], dim=1)

    def forward(self, output: Tensor | dict[str, Tensor], batch: Batch) -> Loss:
        """Return the loss of scores (B, C) for labels (B,) or (B, C).

        With several heads, ``output`` is a dict of scores, and each head gives a weighted term.
        """
        if isinstance(output, Tensor):
            loss: Tensor = self._score(output, batch.labels)
            return loss
        weights = self.config.head_weights
        return {
            name: weights.get(name, 1.0) * self._score(scores, batch.labels)
            for name, scores in output.items()
        }

    def logits(self, output: Tensor | dict[str, Tensor], head: str | None = None) -> Tensor:
        """Return the scores for meters: those of ``head``, or of the first head."""
        if isinstance(output, Tensor):
            return output
        return output[head or next(iter(output))]

    @property
    def chance_loss(self) -> float | None:
        """Cross-entropy of equal scores."""
        names = self.config.heads or ("",)
        weight = sum(self.config.head_weights.get(name, 1.0) for name in names)
        if self.config.targets:
            return weight * math.log(2)
        is_entropy = self.config.loss == "CrossEntropyLoss"
        return weight * math.log(self.num_classes) if is_entropy else None

    def load_scores(self, embed_dim: int, checkpoint: Mapping[str, Any]) -> Scores:
        """Return the classifier; the first one if there are several."""
        weights = weights_at(checkpoint, "model.head")
        num_classes = len([value for value in weights.values() if value.ndim == 2][-1])
        head = self.build_chains(embed_dim, num_classes) or nn.Linear(embed_dim, num_classes)
        if takes_tokens(head):
            raise UserError("method.teacher: its classifier takes tokens, and cannot teach scores")
        load_part(head, checkpoint, "model.head")
        return Scores(next(iter(head.values())) if isinstance(head, Heads) else head)


def known_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the binary cross-entropy, averaged over known labels of an image, then over images.

    Args:
        scores: (B, C).
        labels: (B, C): 1, 0, or -1 to be ignored.
    """
    known = (labels >= 0).float()
    losses = F.binary_cross_entropy_with_logits(
        scores.float(), labels.clamp(min=0).float(), weight=known, reduction="none"
    )
    return (losses.sum(dim=1) / known.sum(dim=1).clamp(min=1)).mean()


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
    known = [loss for loss in nn.modules.loss.__all__ if loss.endswith("Loss")]
    if name.startswith("classy:") or (name not in known and classy.has("loss", name)):
        loss: nn.Module = classy.build("loss", name, args)
        return loss
    if name not in known:
        raise UserError(
            f"method.loss={name!r} is not a loss of torch.nn; {nearest(name, known)}; Classy "
            "Vision's are written classy:NAME"
        )
    try:
        built: nn.Module = getattr(nn, name)(**args)
    except TypeError as error:
        raise UserError(f"method.loss_args={args} do not fit {name}: {error}") from error
    return built
