"""Methods that train classifiers on a backbone, which may be frozen (linear probe).

B: images per rank, E: features of the backbone, C: outputs of a classifier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from selftask.batch import Batch, Loss
from selftask.config.fields import setting
from selftask.config.schema import total_views
from selftask.config.schema.optimizer import GroupRule
from selftask.errors import UserError, with_noun
from selftask.meters.accuracy import Accuracy
from selftask.methods.base import Method, Task
from selftask.models.build import embed_dim
from selftask.models.classifier.classifier import Classifier, Heads, build_chain, takes_tokens
from selftask.models.features.extract import offers
from selftask.models.weights.load import load_part
from selftask.models.weights.read import weights_at
from selftask.models.weights.trained import Scores


class Classification(Method):
    """Method that trains one classifier, or several by name, whose weighted losses are added.

    A subclass sets ``num_classes``, C, before this class's ``build_network``, and implements
    ``score_loss``. The network gets one view of an image, or several if a head begins with
    ``concat_views``.
    """

    loss_reduction = "samples"
    sample_dim = 0
    outputs_logits = True
    num_classes: int
    label_shape: tuple[int, ...] = (1,)  # of the labels of one image

    @dataclass(frozen=True, kw_only=True)
    class Config:
        freeze_backbone: bool = False
        """Whether only the classifier is trained (linear probe)."""
        head: list[Any] = setting([], of="head_blocks")
        """Blocks of the classifier, applied in order; empty: one linear layer."""
        heads: dict[str, list[Any]] = setting({}, of="head_blocks")
        """Several classifiers by name, each a list of blocks; meters use the first by default."""
        head_weights: dict[str, float] = setting({}, min=0)
        """Weights of the losses of ``heads``; 1 for heads without an entry."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            count, method = total_views(config["views"]), config["method"]["name"]
            for blocks in self.heads.values() or [self.head]:
                expected = blocks[0].get("num_views", 1) if blocks else 1
                if count != expected:
                    hint = f", or a head of [{{name: concat_views, num_views: {count}}}, linear]"
                    yield (
                        f"views: {method} needs {with_noun(expected, 'view')} of an image, "
                        f"got {count}; give as many{hint if expected == 1 else ''}"
                    )
            if self.freeze_backbone and config["backbone"].get("lora"):
                yield "freeze_backbone: true freezes the adapters of backbone.lora, too"
            if self.head and self.heads:
                yield "heads: there is method.head, too; put it among them under a name"
            for name, blocks in self.heads.items():
                if not blocks:
                    yield f"heads.{name}: a list of blocks is expected, such as [linear]"
            for name in self.head_weights:
                if name not in self.heads:
                    names = ", ".join(self.heads) or "there are none"
                    yield f"head_weights.{name}: no such head in method.heads; {names}"
            if self.heads and config["train"]["step"]["name"] == "grad_cache":
                yield "heads: train.step=grad_cache divides one output; take another train step"

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Return the backbone with its classifiers; raise UserError if a head does not fit."""
        head = self.build_heads(embed_dim(backbone), self.num_classes)
        if head is not None and takes_tokens(head) and "dense" not in offers(backbone):
            raise UserError(
                "method.head: pooled_tokens needs patch tokens, and this backbone gives pooled "
                "features only"
            )
        frozen = self.config.freeze_backbone
        return Classifier(backbone, self.num_classes, frozen=frozen, head=head)

    def build_heads(self, width: int, num_classes: int) -> nn.Module | None:
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

    def group_rules(self) -> list[GroupRule]:
        """Freeze the backbone if ``freeze_backbone`` is set."""
        return [GroupRule(match="network.backbone", freeze=True)] * self.config.freeze_backbone

    def on_start(self, task: Task) -> None:
        """Raise UserError if an ``Accuracy`` meter does not fit scores or labels.

        Runs without test phases and other meters are not checked.
        """
        for meter in task.meters if task.has_test_phases else ():
            if isinstance(meter, Accuracy):
                meter.validate((1, self.num_classes), self.label_shape)

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        views = batch.all_views
        batch.input = views[0] if len(views) == 1 else views

    def score_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of one classifier, a mean over images.

        Args:
            scores: (B, C).
            labels: (B,), or (B, C) if an image has several or mixed labels.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss of scores")

    def forward(self, output: Tensor | dict[str, Tensor], batch: Batch) -> Loss:
        """Return the loss of scores (B, C), or a weighted term for each head of a dict."""
        if isinstance(output, Tensor):
            return self.score_loss(output, batch.labels)
        weights = self.config.head_weights
        return {
            name: weights.get(name, 1.0) * self.score_loss(scores, batch.labels)
            for name, scores in output.items()
        }

    def logits(self, output: Tensor | dict[str, Tensor], head: str | None = None) -> Tensor:
        """Return the scores (B, C) for meters: those of ``head``, or of the first head."""
        if isinstance(output, Tensor):
            return output
        return output[head or next(iter(output))]

    @property
    def total_weight(self) -> float:
        """Sum of the weights of all heads; 1 for a single unnamed head."""
        return sum(self.config.head_weights.get(name, 1.0) for name in self.config.heads or ("",))

    def load_scores(self, embed_dim: int, checkpoint: Mapping[str, Any]) -> Scores:
        """Return the classifier, or the first of several.

        Raises:
            UserError: If a classifier takes patch tokens.
        """
        weights = weights_at(checkpoint, "model.head")
        num_classes = len([value for value in weights.values() if value.ndim == 2][-1])
        head = self.build_heads(embed_dim, num_classes) or nn.Linear(embed_dim, num_classes)
        if takes_tokens(head):
            raise UserError("method.teacher: its classifier takes tokens, and cannot teach scores")
        load_part(head, checkpoint, "model.head")
        return Scores(next(iter(head.values())) if isinstance(head, Heads) else head)
