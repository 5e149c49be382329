"""HCL: SimCLR with larger weights of hard negatives, corrected for false negatives.

B: images per rank, W: ranks, D: width of the head, M: negatives of a view.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.families.batch_contrast import BatchContrast
from selftask.models.losses.contrast import positives_and_negatives
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("hcl")
class HCL(BatchContrast):
    """HCL (arXiv:2010.04592): SimCLR that weights hard negatives and corrects for false ones.

    With ``hardness=0`` it is Debiased Contrastive Learning (Chuang et al., NeurIPS 2020,
    arXiv:2007.00224).

    Loss: ``-log exp(p) / (exp(p) + N)`` of the similarity p of two views, a cosine divided by the
    temperature. N is the sum of ``exp(s)`` over the similarities s of negatives, weighted by
    ``exp(beta s)`` and corrected by the probability tau+ of false negatives (eqs. 4 and 5).

    Use it in place of ``simclr`` if many images of a batch are of one class; with ``hardness: 0``
    it only corrects for false negatives.

    Differs from the authors' code:

    * Negatives are the images of all ranks; in the authors' code, those of one rank.
    * BatchNorm statistics are those of both views together; in the authors' code, those of each
      view.
    * The hidden layer of the head is as wide as the backbone's features; in the authors' code, 512.
    """

    paper = "Robinson et al., Contrastive Learning with Hard Negative Samples, ICLR 2021"

    @dataclass(frozen=True, kw_only=True)
    class Config(BatchContrast.Config):
        temperature: float = setting(0.5, above=0)
        """Temperature of the similarities."""
        same_class: float = setting(0.1, min=0, below=1)
        """Probability that a negative is of the image's own class, tau+; 0.1 for ten classes."""
        hardness: float = setting(1.0, min=0)
        """Concentration of negatives on similar images, beta; 0: equal weights."""

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss of eq. 5 for ``output`` (2, B, D), averaged over images and views."""
        config = self.config
        return hcl_loss(
            *output,
            temperature=config.temperature,
            same_class=config.same_class,
            hardness=config.hardness,
            num_negatives=self.num_negatives,
        )

    @property
    def chance_loss(self) -> float:
        """Loss of equal similarities: ln(1 + 2 * (batch - 1))."""
        return math.log(1 + self.num_negatives)


@in_full_precision
def hcl_loss(
    first: Tensor,
    second: Tensor,
    *,
    temperature: float,
    same_class: float,
    hardness: float,
    num_negatives: int,
) -> Tensor:
    """Return the contrastive loss with the estimate of eq. 4 for the sum of true negatives.

    The estimate is at least M * exp(-1 / temperature), the sum of opposite directions.

    Args:
        first: (B, D), not necessarily normalized.
        second: (B, D); row b is the other view of image b.
        temperature: Temperature of the similarities.
        same_class: tau+.
        hardness: beta; the weights have gradients, as in the authors' code.
        num_negatives: M.
    """
    positive, negative = positives_and_negatives(first, second)
    pull, others = (positive / temperature).exp(), negative / temperature  # (2B,), (2B, 2BW)
    hidden = others.isinf()
    others = others.masked_fill(hidden, 0.0)
    weights = (hardness * others).masked_fill(hidden, -torch.inf).softmax(dim=1)  # no overflow
    biased = num_negatives * (weights * others.exp()).sum(dim=1)
    true = (biased - same_class * num_negatives * pull) / (1 - same_class)
    least = num_negatives * math.exp(-1 / temperature)  # of opposite directions
    return -torch.log(pull / (pull + true.clamp(min=least))).mean()
