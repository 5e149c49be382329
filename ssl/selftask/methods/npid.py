"""NPID: recognize each image among the entries of a memory bank of all images.

Equation numbers refer to the paper. NPID++ is the same with more negatives and longer training
(arXiv:1912.01991, table 1).

B: images per rank; N: images of the data set; K: negatives of an image (m in the paper); D: width
of the head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.base import Task
from selftask.methods.families.memory_contrast import MemoryContrast
from selftask.models.heads import mlp
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("npid")
class NPID(MemoryContrast):
    """NPID (arXiv:1805.01978): recognizes each image among features of all images.

    Loss: ``NCE`` of ``exp(z.m_i/tau) / Z`` with the features z of image i, its entry m_i in the
    memory, and noise (eq. 7).

    Published: ImageNet linear top-1 of ResNet-50 58.5 with the updated code (authors' README).

    Use it as a baseline with one view of each image.

    Differs from the authors' code:

    * An image is never its own negative, and the memory starts with unit vectors. The published
      code draws from all images and starts with vectors of about unit length.
    * Z is estimated from negatives, as in the paper; in the authors' code, from negatives and the
      positive. The authors' code adds 1e-7 to the denominators of NCE.
    """

    paper = (
        "Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination, "
        "CVPR 2018"
    )
    columns = {
        "nce": "Term of the loss: each image against noise.",
        "info_nce": "Term of the loss: each image among its negatives.",
        "softmax": "Term of the loss: each image among all images.",
        "proximal": "Term of the loss: distance from the memory.",
    }
    views = 1

    @dataclass(frozen=True, kw_only=True)
    class Config(MemoryContrast.Config):
        hidden_dim: int | None = setting(None, min=1)
        """Width of the head's hidden layer; null: the head is one linear layer, as in the paper."""
        loss: Literal["nce", "info_nce", "softmax"] = "nce"
        """How the softmax over all images is computed: ``nce`` estimates it (eq. 7), ``info_nce``
        is the softmax over the image and its negatives, ``softmax`` is exact (eq. 2), for small
        data sets.
        """
        proximal_weight: float = setting(0.0, min=0)
        """Weight of the squared distance from the image's entry, lambda in eq. 10."""

    def build_head(self, embed_dim: int) -> nn.Module:
        config = self.config
        if config.hidden_dim is None:
            return nn.Linear(embed_dim, config.out_dim)
        return mlp(embed_dim, config.hidden_dim, config.out_dim, norm=False)

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        batch.input = batch.all_views
        if self.config.loss != "softmax":
            self.draw_negatives(batch, task)

    def forward(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the term of ``loss`` and, if weighted, ``proximal`` for ``output`` (1, B, D)."""
        config, features = self.config, output[0]
        if config.loss == "softmax":
            loss = full_softmax(features, self.memory.rows, batch.index, config.temperature)
        else:
            (loss,) = self.contrast(batch, features)
        terms = {config.loss: loss}
        if config.proximal_weight:
            distance = squared_distance(features, self.memory[batch.index])
            terms["proximal"] = config.proximal_weight * distance
        return terms

    @property
    def chance_loss(self) -> float:
        """Loss of equal similarities: ln(1 + K) + K ln(1 + 1/K) for NCE with K ``num_negatives``;
        ln(1 + K) for ``info_nce``; ln(images) for ``softmax``.

        2 * ``proximal_weight`` is added, for orthogonal unit vectors.
        """
        is_exact = self.config.loss == "softmax"
        contrast = math.log(len(self.memory)) if is_exact else super().chance_loss
        return 2 * self.config.proximal_weight + contrast


@in_full_precision
def full_softmax(features: Tensor, memory: Tensor, index: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy of each image's own entry among all (eq. 2, 3), a mean over images.

    Args:
        features: (B, D), not necessarily normalized.
        memory: Entries of all images, (N, D) unit vectors.
        index: Indices of the images, (B,).
        temperature: tau.
    """
    return F.cross_entropy(F.normalize(features, dim=1) @ memory.T / temperature, index)


@in_full_precision
def squared_distance(features: Tensor, entries: Tensor) -> Tensor:
    """Return the mean squared distance of normalized features (B, D) from entries (B, D)."""
    return (F.normalize(features, dim=1) - entries).square().sum(dim=1).mean()
