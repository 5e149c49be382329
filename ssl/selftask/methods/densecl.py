"""DenseCL: MoCo v2 for images and for the locations of their feature maps.

Wang et al., Dense Contrastive Learning for Self-Supervised Visual Pre-Training, CVPR 2021,
arXiv:2011.09157. Equation numbers refer to it.

B: images per rank, S: locations of a feature map, E: width of the backbone, D: of the heads, K:
length of the queues.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.base import Method
from selftask.models.build import embed_dim
from selftask.models.feature_queue import FeatureQueue
from selftask.models.features.extract import extract
from selftask.models.heads import mlp
from selftask.models.losses.contrast import info_nce, shuffle_bn, unshuffle_bn
from selftask.models.network import Network
from selftask.models.precision import in_full_precision, to_float32
from selftask.models.teacher import Teacher
from selftask.random.keyed import LAYER_DRAWS
from selftask.registry import register_method

if TYPE_CHECKING:
    from selftask.task import Task


class DenseOutput(NamedTuple):
    """Output of the network for one view."""

    image: Tensor
    """(B, D), output of the global head."""
    places: Tensor
    """(B, S, D), output of the dense head."""
    features: Tensor
    """(B, S, E), of the backbone, without gradient, to find corresponding locations."""


@register_method("densecl")
class DenseCL(Method):
    """DenseCL (arXiv:2011.09157): MoCo for whole images and for cells of feature maps."""

    columns = {
        "single": "Term of the loss: whole images.",
        "dense": "Term of the loss: cells of the feature maps.",
    }
    loss_reduction = "samples"
    sample_dim = None
    views = 2
    requires = ("dense",)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(128, min=1, tiny=16)
        """Width of the head's output, D."""
        hidden_dim: int | None = setting(None, min=1, tiny=32)
        """Width of the heads' hidden layers; null: the backbone's."""
        queue_size: int = setting(65_536, min=1, tiny=lambda batch: 2 * batch)
        """Length of both queues, in keys; K."""
        temperature: float = setting(0.2, above=0)
        """Temperature of the similarities, tau in eq. 1 and 2."""
        momentum: float = setting(0.999, min=0, max=1)
        """Momentum of the teacher."""
        dense_weight: float = setting(0.5, min=0, max=1)
        """Weight of the dense loss, lambda in eq. 3."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            train = config["train"]
            keys = train["batch_size"] * train["accumulate"]
            if self.queue_size < keys:
                yield (
                    f"queue_size: {self.queue_size} is less than the {keys} keys of one update "
                    "(train.batch_size * train.accumulate)"
                )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.queue = FeatureQueue(config.queue_size, config.out_dim)
        self.dense_queue = FeatureQueue(config.queue_size, config.out_dim)
        self.pending: list[tuple[Tensor, Tensor]] = []  # rows for both queues since the last step

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Build two heads like MoCo's; layers of the dense head act as 1x1 convolutions.

        See section 3.2. The published code initialises them from a normal distribution of deviation
        0.01. Here they have torch's default initialisation, as in MoCo.
        """
        dim = embed_dim(backbone)
        sizes = (dim, self.config.hidden_dim or dim, self.config.out_dim)
        return DenseNetwork(backbone, mlp(*sizes, norm=False), mlp(*sizes, norm=False))

    def setup(self, task: Task) -> None:
        self.teacher = Teacher(task.base_model)

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Use the first view as query and the second as key."""
        batch.input = batch.all_views[0]

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Compute the keys. Keys of images and mean dense keys are enqueued after the step."""
        batch = task.last_batch
        with LAYER_DRAWS.exchanged(shuffle_bn):
            key = self.teacher(shuffle_bn(batch.all_views[1]))
        key = DenseOutput(*(unshuffle_bn(to_float32(rows)) for rows in key))
        batch["key"] = DenseOutput(*(F.normalize(rows, dim=-1) for rows in key))
        if task.train:
            mean = F.normalize(key.places.mean(dim=1), dim=1)  # t_- of section 3.3: (B, D)
            self.pending.append((batch["key"].image, mean))

    def forward(self, output: DenseOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the two terms of eq. 3."""
        config, key = self.config, batch["key"]
        single = info_nce(
            output.image[None],
            key.image[None],
            self.queue.rows[None],
            temperature=config.temperature,
        )
        dense = dense_info_nce(
            output.places,
            key.places,
            self.dense_queue.rows,
            corresponding(output.features, key.features),
            temperature=config.temperature,
        )
        return {"single": (1 - config.dense_weight) * single, "dense": config.dense_weight * dense}

    @property
    def chance_loss(self) -> float:
        """Loss if all similarities are equal: each key is one of 1 + K."""
        return math.log(1 + self.config.queue_size)

    @torch.no_grad()
    def on_update(self, task: Task) -> None:
        """Update the teacher, then replace the oldest keys by those of this step."""
        self.teacher.update(task.base_model, momentum=self.config.momentum)
        for image, mean in self.pending:
            self.queue.update(image)
            self.dense_queue.update(mean)
        self.pending.clear()


class DenseNetwork(Network):
    """The backbone, a global head on pooled features and a dense head on the feature map."""

    def __init__(self, backbone: nn.Module, head: nn.Module, dense_head: nn.Module) -> None:
        super().__init__(backbone, head)
        self.dense_head = dense_head

    def forward(self, images: Tensor) -> DenseOutput:  # type: ignore[override]
        """Images (B, C, H, W) of one view -> ``DenseOutput``."""
        LAYER_DRAWS.enter([0])
        features = extract(self.backbone, images)
        self.embedding = features.pooled.detach()
        patches = features.tokens.patches  # (B, S, E)
        return DenseOutput(self.head(features.pooled), self.dense_head(patches), patches.detach())


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
        query: (B, S, D).
        key: (B, S, D).
        queue: (K, D), one mean vector for each older image.
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
