"""MACL: SimCLR with weighted positives, and a temperature that follows the agreement of views.

B: images per rank, D: width of the head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.collectives import all_reduce_mean
from selftask.methods.families.batch_contrast import BatchContrast
from selftask.models.losses.contrast import positives_and_negatives
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("macl")
class MACL(BatchContrast):
    """MACL (arXiv:2207.07874): SimCLR with a temperature that rises as the views agree.

    Loss: ``-w log softmax(cos/tau)`` with ``tau = tau0 (1 + alpha (A - A0))`` of the mean agreement
    A, and weights ``w = 1 / (1 - P)`` of the softmax P of a positive; tau and w have no gradient.

    Use it in place of ``simclr`` if its temperature is hard to choose.

    Differs from the authors' code:

    * The agreement is averaged over the images of all ranks. The authors' code was not available;
      results are compared with lightly's code.
    """

    paper = (
        "Huang et al., Model-Aware Contrastive Learning: Towards Escaping the Dilemmas, ICML 2023"
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(BatchContrast.Config):
        temperature: float = setting(0.1, above=0)
        """Temperature at an agreement of ``agreement_start``, tau_0."""
        temperature_slope: float = setting(0.5, min=0, below=1)
        """Relative rise of the temperature with the agreement, alpha."""
        agreement_start: float = setting(0.0, min=-1, max=1)
        """Agreement, the mean cosine of positives, at which ``temperature`` applies; A_0."""

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the weighted loss for ``output`` (2, B, D), averaged over images and views."""
        config = self.config
        return macl_loss(
            *output,
            temperature=config.temperature,
            slope=config.temperature_slope,
            start=config.agreement_start,
        )

    @property
    def chance_loss(self) -> float:
        """Loss of equal similarities: (1 + 1 / M) * ln(1 + M) with M = 2 * (batch - 1)."""
        negatives = self.num_negatives
        return (1 + 1 / negatives) * math.log(1 + negatives)


@in_full_precision
def macl_loss(
    first: Tensor, second: Tensor, *, temperature: float, slope: float, start: float
) -> Tensor:
    """Return NT-Xent with adaptive temperature, weighted by 1 / (1 - P) of each positive.

    P is the softmax of the positive; neither temperature nor weights have gradients.

    Args:
        first: (B, D), not necessarily normalized.
        second: (B, D); row b is the other view of image b.
        temperature: tau_0.
        slope: alpha.
        start: A_0.
    """
    positive, negative = positives_and_negatives(first, second)
    agreement = all_reduce_mean(positive.detach().mean())
    tau = temperature * (1 + slope * (agreement - start))
    log_p = F.log_softmax(torch.cat([positive[:, None], negative], dim=1) / tau, dim=1)[:, 0]
    weights = -1 / torch.expm1(log_p.detach())  # 1 / (1 - P)
    return -(weights * log_p).mean()
