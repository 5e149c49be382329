"""SwAV: predict the cluster of one view of an image from another, with balanced clusters.

Equation numbers refer to the paper.

V: views, the first two of which are assigned to clusters; B: images per rank, W: ranks; D: width
of the head; K: prototypes; L: length of the queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema.optimizer import GroupRule
from selftask.config.values.duration import steps_in
from selftask.distributed.collectives import rank, world_size
from selftask.methods.base import Task
from selftask.methods.families.prototypes import PrototypeLayer, target_entropy
from selftask.models.clustering import swapped_cross_entropy
from selftask.models.feature_queue import FeatureQueue
from selftask.models.heads import Prototypes, mlp
from selftask.models.precision import to_float32
from selftask.models.weights.trained import Scores
from selftask.registry import register_method

NUM_ASSIGNED = 2  # number of views whose assignments the others predict


@register_method("swav")
class SwAV(PrototypeLayer):
    """SwAV (arXiv:2006.09882): predicts the cluster of one view from another, with multi-crop.

    Loss: ``-sum_k a_k log softmax(z.c/tau)_k`` of the features z of a view and prototypes c, with
    balanced assignments a of another view (eq. 6).

    Published: ImageNet linear top-1 of ResNet-50 72.1 after 100 epochs, 75.3 after 800 (authors'
    README).

    Use it for convolutional networks with multi-crop; a queue helps small batches.

    Differs from the authors' code:

    * Prototypes are initially uniform on the sphere; in the authors' code, directions of torch's
      initial weights.
    * The queue is filled from the first batch on and used from ``queue_start`` on; in the authors'
      code it is also filled only from ``queue_start`` on.
    """

    paper = (
        "Caron et al., Unsupervised Learning of Visual Features by Contrasting Cluster "
        "Assignments, NeurIPS 2020"
    )
    columns = {"kl": "Term of the loss: divergence of the student from its targets."}
    loss_reduction = "statistics"  # sizes of the clusters
    views = (2, None)

    @dataclass(frozen=True, kw_only=True)
    class Config(PrototypeLayer.Config):
        out_dim: int = setting(128, min=1, tiny=16)
        """Width of the head's output, D."""
        num_prototypes: int = setting(3000, min=1, tiny=12)
        """Number of prototypes, K."""
        epsilon: float = setting(0.05, above=0)
        """Weight of the entropy in eq. 3; smaller values give harder assignments."""
        sinkhorn_iterations: int = setting(3, min=1)
        """Number of iterations of Sinkhorn-Knopp."""
        hard_assignments: int | str = setting(0, duration=True)
        """Duration for which assignments are hard (one-hot), an option of VISSL."""
        queue_size: int = setting(0, min=0, tiny=lambda batch: 2 * batch)
        """Length of the queue, in images; L. The paper has 3840 for batches of 256. 0: no queue."""
        queue_start: int | str = setting("15 epochs", duration=True, tiny=1)
        """Training time before the queue is used."""
        freeze_prototypes: int | str = setting("1 epoch", duration=True)
        """Duration for which the prototypes are not trained."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            batch_size = config["train"]["batch_size"]
            if 0 < self.queue_size < batch_size:
                yield (
                    f"queue_size: {self.queue_size} images are fewer than the {batch_size} of a "
                    "batch; give several batches, or 0 for no queue"
                )

    prototypes: Prototypes

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.prototypes = Prototypes(config.out_dim, config.num_prototypes)  # C, trained
        self.queue = FeatureQueue(config.queue_size, NUM_ASSIGNED, config.out_dim)  # (L, 2, D)
        self.queue_is_used = self.is_hard = False

    def build_head(self, embed_dim: int) -> nn.Module:
        return mlp(embed_dim, self.config.hidden_dim, self.config.out_dim, norm=self.config.norm)

    def setup(self, task: Task) -> None:
        super().setup(task)
        config = self.config
        self.queue_start = steps_in(config.queue_start, task.length)
        self.hard_steps = steps_in(config.hard_assignments, task.length)

    def group_rules(self) -> list[GroupRule]:
        """Freeze the prototypes at first, while features are random."""
        return [GroupRule(match="loss.prototypes", freeze=self.config.freeze_prototypes)]

    def on_forward(self, task: Task) -> None:
        """Decide whether assignments are hard and whether the queue is used; collect its entries.

        The queue is filled from the first batch on and used from ``queue_start`` on, if full.
        """
        is_full = task.clock.trained_batches * task.length.batch_size >= len(self.queue) > 0
        self.is_hard = task.steps_done < self.hard_steps
        self.queue_is_used = is_full and task.steps_done >= self.queue_start
        if task.train and len(self.queue):
            assigned = to_float32(task.last_batch.output[:NUM_ASSIGNED].detach())
            self.pending.append(F.normalize(assigned, dim=2).transpose(0, 1))  # (B, 2, D)

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the loss of eq. 6 for ``output`` (V, B, D), averaged over pairs of views.

        The cross-entropy is split into the entropy of the assignments, which has no gradient, and
        the rest.
        """
        with torch.autocast(output.device.type, enabled=False):
            scores = self.scores(output)  # (V, B, K)
            assigned = torch.stack([self.assign(scores[v], v) for v in range(NUM_ASSIGNED)])
            log_probs = F.log_softmax(scores / self.config.temperature, dim=2)  # (V, B, K)
            cross_entropy = swapped_cross_entropy(assigned, log_probs)
        entropy = target_entropy(assigned)
        return {"target_entropy": entropy, "kl": cross_entropy - entropy}

    @torch.no_grad()
    def assign(self, scores: Tensor, view: int) -> Tensor:
        """Return the assignments (B, K) of the images of one view (eq. 3 to 5).

        Assignments are balanced over the batch of all ranks, and over the queue if it is used. Each
        rank contributes its share of the queue. Without the queue, batches much smaller than K
        leave most clusters empty. If assignments are hard (``is_hard``), they are one-hot.

        Args:
            scores: (B, K).
            view: Index of the view.
        """
        batch = len(scores)
        if self.queue_is_used:
            share = self.queue.rows[:, view].tensor_split(world_size())[rank()]  # (L / W, D)
            scores = torch.cat([self.prototypes(share), scores])  # (L / W + B, K)
        assigned = self.balanced(scores, self.config.epsilon)[-batch:]
        if self.is_hard:
            return torch.zeros_like(assigned).scatter(1, assigned.argmax(dim=1, keepdim=True), 1.0)
        return assigned

    def on_update(self, task: Task) -> None:
        """Normalize the prototypes and enqueue the batch's features."""
        super().on_update(task)
        self.prototypes.normalize_()
        for features in self.take_pending():
            self.queue.update(features)

    @property
    def chance_loss(self) -> float:
        """Loss of equal probabilities: ln(``num_prototypes``)."""
        return math.log(self.config.num_prototypes)

    def load_scores(self, embed_dim: int, checkpoint: Mapping[str, Any]) -> Scores:
        """Load head and prototypes; their targets are balanced by Sinkhorn-Knopp."""
        return self.trained_scores(embed_dim, checkpoint, "model.head", self.config.epsilon)
