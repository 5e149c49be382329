"""Distances of a student's features or scores from those of a teacher.

D: features; K: classes or prototypes. Rows are images or patches of all views.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.models.precision import in_full_precision, to_float32


def cosine_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Return 1 - cosine of student and teacher features (..., D), averaged over rows."""
    return 1 - F.cosine_similarity(to_float32(student), teacher, dim=-1).mean()


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """Return -sum_k p log softmax(logits) of (..., K), averaged over rows."""
    return -(probs * F.log_softmax(to_float32(logits), dim=-1)).sum(dim=-1).mean()


@in_full_precision
def softened_distance(student: Tensor, teacher: Tensor, temperature: float, *, kl: bool) -> Tensor:
    """Return T^2 times KL divergence or cross-entropy at temperature T, averaged over rows.

    See section 2 of Hinton et al. (arXiv:1503.02531): the factor T^2 keeps the magnitude of
    gradients roughly independent of T.

    Args:
        student: Logits (..., K).
        teacher: Logits (..., K).
        temperature: Temperature of both, T.
        kl: True for the KL divergence: the teacher's entropy, a constant, is subtracted. False for
            the cross-entropy.
    """
    probs = F.softmax(teacher / temperature, dim=-1)
    loss = soft_cross_entropy(student / temperature, probs)
    if kl:
        loss = loss - torch.special.entr(probs).sum(dim=-1).mean()
    return temperature**2 * loss


@in_full_precision
def label_cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of labeled images, summed over views and divided by V * B.

    Args:
        output: Logits (V, B, K).
        labels: (B,), -1 for none, or probabilities (B, K).
    """
    total = output.new_zeros(())
    for view in output:
        total = total + F.cross_entropy(view, labels, ignore_index=-1, reduction="sum")
    return total / (output.shape[0] * output.shape[1])
