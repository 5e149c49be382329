"""Methods in which a student learns the output of a frozen teacher or tokenizer (distillation).

V: views; B: images per rank; D: width of the teacher's output; K: length of a queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema import FrozenModule
from selftask.methods.base import Method, Task
from selftask.models.build import embed_dim
from selftask.models.distillation.patch_targets import PatchTokenizer, TokenTargets
from selftask.models.feature_queue import FeatureQueue
from selftask.models.network import Network
from selftask.models.precision import to_float32
from selftask.models.weights.frozen import Frozen
from selftask.models.weights.trained import TrainedNetwork


def trained_teacher(
    missing: str = "give a run, an exported backbone.pt, timm:NAME or package.module:Class",
) -> Any:
    """Return a required config field for a frozen module, with a hint for users who omit it."""
    return setting(missing=missing, tiny=FrozenModule(model="timm:test_vit", weights="none"))


def open_tokenizer(method: Method, task: Task) -> TokenTargets:
    """Open the tokenizer named by the config key ``method.tokenizer``.

    It is the user's own class, or a trained network: the token of a patch is then the class or
    prototype with the highest score.

    Raises:
        UserError: If the tokenizer does not exist, or gives no tokens.
    """
    if FrozenModule.of(method.config.tokenizer).is_code:
        return TokenTargets(method.open_frozen("tokenizer", task).network, "method.tokenizer")
    trained = method.open_trained("tokenizer", task, scores=True)
    assert trained.scores is not None
    backbone = trained.network.backbone
    scores = trained.scores.patches or trained.scores
    tokenizer = PatchTokenizer(backbone, scores.head, scores.width(backbone))
    return TokenTargets(tokenizer, "method.tokenizer")


class Distillation(Method):
    """Method whose student learns the output of ``self.teacher``, a frozen trained network."""

    loss_reduction = "samples"
    learns_scores: ClassVar[bool] = True
    """Whether the teacher must have a head that scores classes or prototypes."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        teacher: FrozenModule

    def open_teacher(self, task: Task) -> TrainedNetwork:
        """Return the teacher, and set ``out_dim`` to the width of its output, D.

        Raises:
            UserError: If the teacher does not exist, or does not fit the method or the images.
        """
        trained = self.open_trained("teacher", task, scores=self.learns_scores)
        self.out_dim = trained.width
        return trained

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Open the teacher, and build the student on top of the backbone.

        Raises:
            UserError: As ``open_teacher``.
        """
        self.teacher = Frozen(self.open_teacher(task).network)
        return Network(backbone, self.build_head(embed_dim(backbone)))

    def on_forward(self, task: Task) -> None:
        """Compute the teacher's output ``batch["targets"]`` (V, B, D)."""
        batch = task.last_batch
        batch["targets"] = to_float32(self.teacher(batch.all_views))


class QueueDistillation(Distillation):
    """Method that compares images with ``self.queue``, the teacher's features of the latest images.

    Teacher and student see the same view. Features are unit vectors, and are enqueued after the
    step.
    """

    views = 1
    learns_scores = False

    @dataclass(frozen=True, kw_only=True)
    class Config(Distillation.Config):
        teacher: FrozenModule = trained_teacher()
        """Backbone whose similarities between images are learned."""
        queue_size: int = setting(65_536, min=1, tiny=lambda batch: 2 * batch)
        """Length of the queue, in images; K."""

    def setup(self, task: Task) -> None:
        super().setup(task)
        self.queue = FeatureQueue(self.config.queue_size, self.out_dim)

    def on_forward(self, task: Task) -> None:
        """Compute the teacher's unit vectors ``batch["targets"]`` (B, D).

        In training, collect the ``rows`` of the batch, which are enqueued after the step.
        """
        super().on_forward(task)
        batch = task.last_batch
        batch["targets"] = F.normalize(batch["targets"][0], dim=1)
        if task.train:
            self.pending.append(self.rows(batch))

    def queues(self) -> tuple[FeatureQueue, ...]:
        """Return the queues, in the order of ``rows``."""
        return (self.queue,)

    def rows(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the features (B, D) of a batch to enqueue, one tensor for each queue."""
        return (batch["targets"],)

    def on_update(self, task: Task) -> None:
        """Replace the oldest features of each queue with those of this step."""
        for rows in self.take_pending():
            for queue, features in zip(self.queues(), rows, strict=True):
                queue.update(features)
