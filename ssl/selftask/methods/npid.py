"""NPID: recognise each image among the entries of a memory bank of all images.

Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination, CVPR 2018,
arXiv:1805.01978. Equation numbers refer to it. NPID++ is the same with more negatives and longer
training (arXiv:1912.01991, table 1).

B: images per rank; N: images of the data set; K: negatives of an image (m in the paper); D: width
of the head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.base import Method
from selftask.models.heads import mlp
from selftask.models.losses.noise_contrast import (
    Normalizer,
    chance_of_nce,
    info_nce,
    nce,
    other_images,
)
from selftask.models.memory_bank import MemoryBank
from selftask.models.precision import in_full_precision
from selftask.random.keyed import uniform
from selftask.registry import register_method

if TYPE_CHECKING:
    from selftask.task import Task


@register_method("npid")
class NPID(Method):
    """NPID (arXiv:1805.01978): each image is a class, with a memory bank of all images."""

    columns = {
        "nce": "Term of the loss: each image against noise.",
        "info_nce": "Term of the loss: each image among its negatives.",
        "softmax": "Term of the loss: each image among all images.",
        "proximal": "Term of the loss: distance from the memory.",
    }
    loss_reduction = "samples"  # negatives come from the memory
    views = 1
    requires = ("index",)  # the memory has an entry for each image

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(128, min=1, tiny=16)
        """Width of the head's output, D."""
        hidden_dim: int | None = setting(None, min=1)
        """Width of the head's hidden layer; null: the head is one linear layer, as in the paper."""
        loss: Literal["nce", "info_nce", "softmax"] = "nce"
        """How the softmax over all images is computed: ``nce`` estimates it (eq. 7), ``info_nce``
        is the softmax over the image and its negatives, ``softmax`` is exact (eq. 2), for small
        data sets.
        """
        num_negatives: int = setting(4096, min=1, tiny=16)
        """Negatives drawn from the memory bank, K; not used by ``loss: softmax``."""
        temperature: float = setting(0.07, above=0)
        """Temperature of the similarities, tau."""
        momentum: float = setting(0.5, min=0, max=1)
        """Momentum of the memory bank."""
        proximal_weight: float = setting(0.0, min=0)
        """Weight of the squared distance from the image's entry, lambda in eq. 10."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.loss == "nce":
            self.normalizer = Normalizer()  # Z in eq. 4
        self.pending: list[tuple[Tensor, Tensor]] = []  # index and features since the last step

    def build_head(self, embed_dim: int) -> nn.Module:
        config = self.config
        if config.hidden_dim is None:
            return nn.Linear(embed_dim, config.out_dim)
        return mlp(embed_dim, config.hidden_dim, config.out_dim, norm=False)

    def setup(self, task: Task) -> None:
        self.num_images = task.data_module.num_images
        self.memory = MemoryBank(self.num_images, self.config.out_dim)

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Draw the indices of each image's negatives."""
        batch.input = batch.all_views
        if self.config.loss != "softmax":
            key = batch.key.to(batch.index.device, non_blocking=True)
            draws = uniform(task.config.train.seed, key, self.config.num_negatives)
            batch["negatives"] = other_images(draws, batch.index, len(self.memory))  # (B, K)

    def on_forward(self, task: Task) -> None:
        """Add Z, which is estimated in the first step; collect features for the memory."""
        batch, features = task.last_batch, task.last_batch.output[0].detach()
        if self.config.loss == "nce":
            batch["normalizer"] = self.normalizer.of(
                features, self.memory, batch["negatives"], self.config.temperature
            )
        if task.train:
            self.pending.append((batch.index, features))

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return eq. 7, or a softmax, and the proximal term of eq. 10; ``output`` (1, B, D)."""
        config, features = self.config, output[0]
        own = self.memory[batch.index]  # (B, D)
        if config.loss == "softmax":
            loss = full_softmax(features, self.memory.rows, batch.index, config.temperature)
        elif config.loss == "info_nce":
            negatives = self.memory[batch["negatives"]]
            loss = info_nce(features, own, negatives, config.temperature)
        else:
            negatives, z = self.memory[batch["negatives"]], batch["normalizer"]
            loss = nce(features, own, negatives, config.temperature, z, num_images=len(self.memory))
        terms = {config.loss: loss}
        if config.proximal_weight:
            terms["proximal"] = config.proximal_weight * squared_distance(features, own)
        return terms

    def on_update(self, task: Task) -> None:
        """Update the memory; in the first step, set Z for the rest of the run."""
        if self.config.loss == "nce":
            self.normalizer.keep(task.last_batch["normalizer"])
        for index, features in self.pending:
            self.memory.update(index, features, self.config.momentum)
        self.pending.clear()

    @property
    def chance_loss(self) -> float:
        """Loss if all similarities are 0: every entry is equally likely."""
        config, negatives = self.config, self.config.num_negatives
        distance = 2 * config.proximal_weight  # between orthogonal unit vectors
        if config.loss == "softmax":
            return distance + math.log(self.num_images)
        if config.loss == "info_nce":
            return distance + math.log1p(negatives)
        return distance + chance_of_nce(negatives)


@in_full_precision
def full_softmax(features: Tensor, memory: Tensor, index: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy of the image's own entry among all (eq. 2, 3), averaged over images.

    Args:
        features: (B, D), of any length.
        memory: Entries of all images, (N, D) unit vectors.
        index: Numbers of the images, (B,).
        temperature: tau.
    """
    return F.cross_entropy(F.normalize(features, dim=1) @ memory.T / temperature, index)


@in_full_precision
def squared_distance(features: Tensor, own: Tensor) -> Tensor:
    """Return the mean squared distance of normalised features (B, D) from entries (B, D)."""
    return (F.normalize(features, dim=1) - own).square().sum(dim=1).mean()
