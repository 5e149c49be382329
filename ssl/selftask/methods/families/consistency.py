"""Consistent Contrast (CO2, arXiv:2010.02217), a term of contrastive methods.

N: rows, such as images or queries; K: negatives of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from selftask.config.fields import setting
from selftask.models.precision import in_full_precision


@dataclass(frozen=True, kw_only=True)
class ConsistencyConfig:
    """Config keys of the CO2 term, a base class for the configs of methods."""

    consistency_weight: float = setting(0.0, min=0)
    """Weight of the term of CO2 (arXiv:2010.02217), alpha; 10 in its paper for MoCo v2."""
    consistency_temperature: float = setting(0.04, above=0)
    """Temperature of the similarities in the term of CO2."""

    def with_consistency(
        self, contrast: Tensor, first: Tensor, second: Tensor
    ) -> dict[str, Tensor]:
        """Return the loss of the method and the weighted term of CO2, by name.

        Args:
            contrast: Loss of the method, a scalar.
            first: Cosines of one view of each image with its negatives, (N, K).
            second: Cosines of the other view with the same negatives. Gradients flow to both.
        """
        term = consistency(first, second, temperature=self.consistency_temperature)
        return {"recognition": contrast, "consistency": self.consistency_weight * term}


@in_full_precision
def consistency(first: Tensor, second: Tensor, *, temperature: float) -> Tensor:
    """Return half the symmetric Kullback-Leibler divergence of softmaxes, averaged over rows.

    CO2, eq. 4: ``(KL(P || Q) + KL(Q || P)) / 2``, which is the sum of (P - Q) (ln P - ln Q) / 2.

    Args:
        first: Similarities (N, K); -inf for entries that are not compared.
        second: (N, K), with -inf at the same entries.
        temperature: Temperature of both.
    """
    log_p, log_q = ((x / temperature).log_softmax(dim=1) for x in (first, second))
    difference = (log_p - log_q).masked_fill(first.isneginf(), 0)
    return ((log_p.exp() - log_q.exp()) * difference).sum(dim=1).mean() / 2
