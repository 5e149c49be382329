"""OBoW: predict which visual words occur in an image, with a vocabulary of the latest features.

V: views of the student, B: images per rank, N: cells of a feature map, E: width of the backbone; at
each of L levels, C: channels, K: words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import all_reduce_mean
from selftask.errors import UserError
from selftask.methods.base import Task
from selftask.methods.families.ema_teacher import EMATeacher, Schedule, teacher_momentum
from selftask.models.build import embed_dim
from selftask.models.feature_queue import FeatureQueue
from selftask.models.features.extract import FeatureExtractor, adapter_of
from selftask.models.features.levels import levels_of
from selftask.models.heads import UnitLength, mlp
from selftask.models.network import indices_by_size
from selftask.models.precision import in_full_precision, to_float32
from selftask.random.keyed import uniform
from selftask.registry import register_method

_DISTANCE_MOMENTUM = 0.99


@register_method("obow")
class OBoW(EMATeacher):
    """OBoW (arXiv:2012.11552): predicts the bag of visual words of an image from a crop of it.

    A teacher describes the first view as a bag of words, which the student predicts from each of
    the other views. The words are the teacher's features of the latest images.

    Loss: ``KL(bag || softmax(kappa s.g(words)))`` of the student's features s and an MLP g, mean
    over levels, images and crops of one size; sizes are added.

    Use it for convolutional networks, with small crops as the student's views.
    """

    paper = (
        "Gidaris et al., OBoW: Online Bag-of-Visual-Words Generation for Self-Supervised Learning, "
        "CVPR 2021"
    )
    loss_reduction = "samples"
    views = (2, None)
    requires = ("hidden",)

    @dataclass(frozen=True, kw_only=True)
    class Config(EMATeacher.Config):
        momentum: Schedule = teacher_momentum({"name": "cosine", "start": 0.99, "end": 1.0})
        """Momentum of the teacher."""
        num_words: int = setting(8192, min=2, tiny=12)
        """Number of words of each vocabulary, K: one word for each of the latest images."""
        levels: int = setting(2, min=1)
        """Number of resolutions of the backbone that have a vocabulary each, from the coarsest."""
        inverse_delta: float = setting(15.0, above=0)
        """Sharpness of the assignment to words, 1 / delta_base: squared distances are multiplied by
        it and divided by the running mean of the smallest ones.
        """
        kappa: float = setting(8.0, above=0)
        """Factor of the scores of words, an inverse temperature."""
        hidden_dim: int | None = setting(None, min=1, tiny=32)
        """Width of the hidden layer of the MLP g; null: the width of the backbone."""

    distances: Tensor

    @staticmethod
    def check_backbone(backbone: nn.Module) -> None:
        """Raise UserError if the stride of the feature maps is unknown."""
        if not adapter_of(backbone).patch_size[0]:
            raise UserError(
                f"backbone: obow does not know the feature maps of a {type(backbone).__name__}; "
                "take a ResNet or a ConvNeXt"
            )

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        self.check_backbone(backbone)
        levels = levels_of(backbone, task.data_module.channels)[: self.config.levels]
        self.layers = tuple(level.layer for level in levels)
        self.register_buffer("distances", torch.full((len(levels),), 0.5))  # running means
        vocabularies = [FeatureQueue(self.config.num_words, level.width) for level in levels]
        for vocabulary in vocabularies:
            vocabulary.rows.normal_().clamp_(min=0)  # as features after a ReLU
        self.vocabularies: Any = nn.ModuleList(vocabularies)
        width = embed_dim(backbone)
        hidden = self.config.hidden_dim or width
        self.generators = nn.ModuleList(
            word_generator(level.width, hidden, width) for level in levels
        )
        return super().build_network(backbone, task)

    def averaged(self, network: Any) -> nn.Module:
        return FeatureExtractor(network.backbone)

    def draw(self, seed: int, key: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
        """Draw the position of the next word of each vocabulary in an image, in [0, 1): (B, L)."""
        return uniform(seed, key, len(self.layers))

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Use the first view for the teacher and the others for the student.

        Set ``batch["by_size"]``, the indices of the student's views of each size.
        """
        batch.input = batch.all_views[1:]
        batch["by_size"] = indices_by_size(batch.input)

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Compute ``batch["bags"]``, (B, K) of each level.

        In training, also collect new words and distances for ``on_update``.
        """
        batch = task.last_batch
        hidden = self.teacher(batch.all_views[0], layers=self.layers).hidden
        cells = [inner_cells(to_float32(hidden[number].map)) for number in self.layers]
        to_words = [
            squared_distances(x.flatten(2).mT, vocabulary.rows)
            for x, vocabulary in zip(cells, self.vocabularies, strict=True)
        ]
        distances = self.distances
        if task.train:
            smallest = torch.stack([distance.amin(dim=2).mean() for distance in to_words])
            smallest = all_reduce_mean(smallest)
            distances = distances.lerp(smallest, 1 - _DISTANCE_MOMENTUM)
            positions = self.drawn(batch, task).unbind(1)
            words = [local_average(*pair) for pair in zip(cells, positions, strict=True)]
            self.pending.append((smallest, words))
        batch["bags"] = [
            bag_of_words(self.config.inverse_delta * distance / mean)
            for distance, mean in zip(to_words, distances, strict=True)
        ]

    @in_full_precision
    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the divergence of ``output`` (V, B, E) from the bags, averaged over levels.

        It is averaged over views of one size, and added over sizes.
        """
        losses: list[Tensor] = []
        for level, bags in enumerate(batch["bags"]):
            weight = self.generators[level](self.vocabularies[level].rows)  # (K, E)
            scores = (self.config.kappa * F.linear(output, weight)).unbind()  # of each view
            for views in batch["by_size"]:
                losses.append(bag_divergence(torch.stack([scores[v] for v in views]), bags))
        return torch.stack(losses).sum() / len(batch["bags"])

    @torch.no_grad()
    def on_update(self, task: Task) -> None:
        """Update the teacher, the running means, and the vocabularies."""
        super().on_update(task)
        for smallest, words in self.take_pending():
            self.distances.lerp_(smallest, 1 - _DISTANCE_MOMENTUM)
            for vocabulary, rows in zip(self.vocabularies, words, strict=True):
                vocabulary.update(rows)


def word_generator(channels: int, hidden_dim: int, embed_dim: int) -> nn.Module:
    """Build the MLP g, which turns words (K, C) into the weights (K, E) of their scores.

    Its BatchNorm normalizes over the words, and has no running statistics.
    """

    def norm(width: int) -> nn.Module:
        return nn.BatchNorm1d(width, track_running_stats=False)

    return nn.Sequential(
        UnitLength(), mlp(channels, hidden_dim, embed_dim, norm=norm), UnitLength()
    )


def inner_cells(features: Tensor) -> Tensor:
    """Return feature maps (B, C, h, w) without their border; small maps are unchanged."""
    return features[:, :, 1:-1, 1:-1] if min(features.shape[2:]) > 2 else features


def local_average(cells: Tensor, position: Tensor) -> Tensor:
    """Return the mean of 3 x 3 neighboring cells of each image, (B, C).

    If a side of the map is shorter than 3 cells, the neighborhood spans it.

    Args:
        cells: (B, C, h, w).
        position: Relative position of the neighborhood among all of them, in [0, 1): (B,).
    """
    rows, columns = (min(3, size) for size in cells.shape[2:])
    averages = F.avg_pool2d(cells, (rows, columns), stride=1).flatten(2)  # (B, C, N)
    index = (position * averages.shape[2]).long()
    return averages.gather(2, index[:, None, None].expand(-1, cells.shape[1], 1)).squeeze(2)


@in_full_precision
def squared_distances(cells: Tensor, words: Tensor) -> Tensor:
    """Return the squared Euclidean distances of cells (B, N, C) from words (K, C): (B, N, K)."""
    lengths = cells.square().sum(dim=2, keepdim=True) + words.square().sum(dim=1)
    return (lengths - 2 * cells @ words.T).clamp(min=0)


def bag_of_words(distances: Tensor) -> Tensor:
    """Return the bag of words of each image, (B, K) with rows of sum 1.

    It is the softmax over words of each cell, then the maximum over cells, divided by its sum.

    Args:
        distances: Distances of cells from words, divided by delta: (B, N, K).
    """
    return F.normalize((-distances).softmax(dim=2).amax(dim=1), p=1, dim=1)


def bag_divergence(scores: Tensor, bags: Tensor) -> Tensor:
    """Return KL(bag || softmax(scores)), averaged over images and views.

    Args:
        scores: (V, B, K).
        bags: (B, K).
    """
    divergence = F.kl_div(scores.log_softmax(dim=2), bags.expand_as(scores), reduction="sum")
    return divergence / scores[..., 0].numel()
