"""Cross-entropy between the similarities of two views to the same other images (ReSSL, CLSA).

V: views, B: images per rank, K: candidates, D: width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from selftask.models.precision import in_full_precision


@in_full_precision
def relation_cross_entropy(
    query: Tensor,
    target: Tensor,
    candidates: Tensor,
    *,
    temperature: float,
    target_temperature: float,
) -> Tensor:
    """Return the mean of -sum_k p_k log q_k, with p and q softmaxes of similarities to candidates.

    p is computed from the target and q from a query: ReSSL (arXiv:2107.09282), eq. 5 and 6. Neither
    p nor the candidates have gradients.

    Args:
        query: (V, B, D), not necessarily normalized.
        target: (B, D), not necessarily normalized.
        candidates: (K, D), unit vectors.
        temperature: Temperature of q.
        target_temperature: Temperature of p.
    """
    candidates = candidates.detach()
    goal = F.normalize(target.detach(), dim=1) @ candidates.T  # (B, K)
    probs = (goal / target_temperature).softmax(dim=1)
    scores = F.normalize(query, dim=2) @ candidates.T / temperature  # (V, B, K)
    return -(probs * scores.log_softmax(dim=2)).sum(dim=2).mean()
