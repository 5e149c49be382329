"""DenseCL: MoCo v2 for images and for the locations of their feature maps.

Equation numbers refer to the paper.

B: images per rank, S: locations of a feature map, E: width of the backbone, D: width of the heads,
K: length of the queues.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import EMATeacher, Schedule, teacher_momentum
from selftask.methods.families.momentum_contrast import MomentumContrast
from selftask.models.build import embed_dim
from selftask.models.feature_queue import FeatureQueue
from selftask.models.losses.contrast import info_nce, unshuffle_bn
from selftask.models.network import Network, PatchOutput
from selftask.models.precision import in_full_precision, to_float32
from selftask.registry import register_method


class Predictions(NamedTuple):
    """Outputs of the two heads for one view."""

    image: Tensor
    """(B, D), of the global head."""
    cells: Tensor
    """(B, S, D), of the dense head."""


class Keys(NamedTuple):
    """The teacher's output for the other view."""

    image: Tensor
    """(B, D), of unit length."""
    cells: Tensor
    """(B, S, D), of unit length."""
    features: Tensor
    """(B, S, E), of the backbone and of unit length, to find corresponding locations."""


@register_method("densecl")
class DenseCL(MomentumContrast, EMATeacher):
    """DenseCL (arXiv:2011.09157): MoCo for whole images and for locations of feature maps.

    Loss: ``(1 - w) InfoNCE(images) + w InfoNCE(locations)`` (eq. 3), with the weight w,
    ``dense_weight``.

    Use it to pretrain a convolutional network for detection or segmentation.

    Differs from the authors' code:

    * Initial weights of the global head are torch's; in the authors' code, Kaiming's with fan-in,
      and zero biases. The dense head has torch's initial weights in both.
    """

    paper = (
        "Wang et al., Dense Contrastive Learning for Self-Supervised Visual Pre-Training, CVPR 2021"
    )
    columns = {
        "single": "Term of the loss: whole images.",
        "dense": "Term of the loss: cells of the feature maps.",
    }
    sample_dim = None
    requires = ("dense",)

    @dataclass(frozen=True, kw_only=True)
    class Config(MomentumContrast.Config, EMATeacher.Config):
        momentum: Schedule = teacher_momentum(0.999)
        """Momentum of the teacher."""
        dense_weight: float = setting(0.5, min=0, max=1)
        """Weight of the dense loss, w (lambda in eq. 3)."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.queue = FeatureQueue(config.queue_size, config.out_dim)
        self.dense_queue = FeatureQueue(config.queue_size, config.out_dim)

    def queues(self) -> tuple[FeatureQueue, ...]:
        return self.queue, self.dense_queue

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Build two heads like MoCo's; layers of the dense head act as 1x1 convolutions."""
        dim = embed_dim(backbone)
        return DenseNetwork(backbone, self.build_head(dim), self.build_head(dim))

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Use the first view as query and the second as key."""
        batch.input = batch.all_views[:1]

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Compute ``batch["key"]``, the ``Keys`` of the batch.

        Image keys and mean dense keys are enqueued after the step.
        """
        batch = task.last_batch
        output = self.shuffled_teacher(batch.all_views[1:])
        rows = [to_float32(unshuffle_bn(x)) for x in (*output.prediction, output.features.patches)]
        key = batch["key"] = Keys(*(F.normalize(x, dim=-1) for x in rows))
        if task.train:
            mean = F.normalize(rows[1].mean(dim=1), dim=1)  # t_- of section 3.3: (B, D)
            self.pending.append((key.image, mean))

    def forward(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the two terms of eq. 3; ``output.prediction`` is a ``Predictions``."""
        config, key, query = self.config, batch["key"], output.prediction
        single = info_nce(
            query.image[None],
            key.image[None],
            self.queue.rows[None],
            temperature=config.temperature,
        )
        dense = dense_info_nce(
            query.cells,
            key.cells,
            self.dense_queue.rows,
            corresponding(output.features.patches, key.features),
            temperature=config.temperature,
        )
        return {"single": (1 - config.dense_weight) * single, "dense": config.dense_weight * dense}


class DenseNetwork(Network):
    """The backbone, a global head on pooled features and a dense head on the feature map."""

    def __init__(self, backbone: nn.Module, head: nn.Module, dense_head: nn.Module) -> None:
        super().__init__(backbone, head)
        self.dense_head = dense_head

    def forward(self, views: list[Tensor]) -> PatchOutput:  # type: ignore[override]
        """Return a ``PatchOutput`` whose prediction is ``Predictions``.

        Args:
            views: A list of one view, (B, C, H, W).
        """
        features = self.extract(views)
        predicted = Predictions(self.head(features.pooled), self.dense_head(features.patches))
        return PatchOutput(predicted, features)


@torch.no_grad()
@in_full_precision
def corresponding(query: Tensor, key: Tensor) -> Tensor:
    """Return the key's most similar location for each location of the query (eq. 4).

    Args:
        query: Backbone features of one view, (B, S, E).
        key: Backbone features of the other view, (B, S, E).

    Returns:
        Indices into the locations of the key, (B, S) int64.
    """
    similarity = F.normalize(query, dim=2) @ F.normalize(key, dim=2).transpose(1, 2)  # (B, S, S)
    return similarity.argmax(dim=2)


@in_full_precision
def dense_info_nce(
    query: Tensor, key: Tensor, queue: Tensor, match: Tensor, *, temperature: float
) -> Tensor:
    """Return ``info_nce`` of each location of the query with its match in the key (eq. 2).

    Args:
        query: (B, S, D), not necessarily normalized.
        key: (B, S, D), unit vectors.
        queue: (K, D), unit vectors: the mean cell of each older image, normalized.
        match: (B, S) locations of the key.
        temperature: tau.
    """
    positive = key.gather(1, match[..., None].expand_as(query))  # (B, S, D)
    return info_nce(
        query.flatten(0, 1)[None],
        positive.flatten(0, 1)[None],
        queue[None],
        temperature=temperature,
    )
