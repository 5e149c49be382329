"""Contrast of images with their own entries and other images' entries of a memory bank.

Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination, CVPR 2018,
arXiv:1805.01978; equation numbers refer to it.

Features and entries may have additional dimensions between B (and K) and D, for several rows per
image; each row is compared with the corresponding row of the entries. Losses are then means over
rows and images.

B: images per rank, K: negatives of an image, D: width, N: images of the data set.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.distributed.accelerator import to_float64
from selftask.distributed.collectives import all_reduce_mean
from selftask.models.memory_bank import MemoryBank
from selftask.models.precision import in_full_precision


def other_images(draws: Tensor, index: Tensor, num_images: int) -> Tensor:
    """Turn draws into indices of other images, each with equal probability.

    Args:
        draws: (B, K) numbers in [0, 1).
        index: Indices of the images themselves, int64 (B,).
        num_images: Number of images in the data set, at least 2.

    Returns:
        (B, K) int64.
    """
    others = (to_float64(draws) * (num_images - 1)).long().to(index.device)
    return others + (others >= index[:, None])


@in_full_precision
def info_nce(features: Tensor, positive: Tensor, negatives: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy of the positive among negatives, averaged over images.

    Args:
        features: (B, D), not necessarily normalized.
        positive: (B, D) unit vectors.
        negatives: (B, K, D) unit vectors.
        temperature: Divisor of the cosines, tau.
    """
    right, wrong = _similarities(features, positive, negatives, temperature)
    logits = torch.cat([right[:, None], wrong], dim=1)  # (B, 1 + K)
    # with more than two dimensions, F.cross_entropy has no deterministic form on CUDA
    return (logits.logsumexp(dim=1) - right).mean()


@in_full_precision
def nce(
    features: Tensor,
    positive: Tensor,
    negatives: Tensor,
    temperature: float,
    normalizer: Tensor,
    *,
    num_images: int,
) -> Tensor:
    """Return the noise-contrastive loss with uniform noise, averaged over images; eq. 6 and 7.

    The probability h that an entry is data and not noise is a sigmoid of
    ``log P - log(K / N)``. The loss of an image is ``-log h`` of its positive minus the sum of
    ``log(1 - h)`` over its K negatives.

    Args:
        features: (B, D), not necessarily normalized.
        positive: (B, D) unit vectors.
        negatives: (B, K, D) unit vectors.
        temperature: Divisor of the cosines, tau.
        normalizer: Z, a scalar: P is ``exp(cosine / tau) / Z``.
        num_images: Number of images of the data set, N.
    """
    right, wrong = _similarities(features, positive, negatives, temperature)
    shift = normalizer.log() + math.log(negatives.shape[1] / num_images)
    of_image = F.softplus(shift - right) + F.softplus(wrong - shift).sum(dim=1)  # (B,)
    return of_image.mean()


def chance_of_nce(num_negatives: int) -> float:
    """Return the loss of ``nce`` if all cosines are equal and Z is estimated from them.

    The probability h of each entry is then 1 / (1 + K).
    """
    return math.log1p(num_negatives) + num_negatives * math.log1p(1 / num_negatives)


@in_full_precision
def estimate_normalizer(
    features: Tensor, negatives: Tensor, temperature: float, num_images: int
) -> Tensor:
    """Return a Monte Carlo estimate of Z, averaged over this rank's images; eq. 8.

    Args:
        features: (B, D), not necessarily normalized.
        negatives: (B, K, D) unit vectors, drawn uniformly.
        temperature: Divisor of the cosines, tau.
        num_images: Number of images of the data set, N.

    Returns:
        A scalar, ``N * mean(exp(cosine / tau))``.
    """
    cosines = torch.einsum("b...d,bk...d->bk...", F.normalize(features, dim=-1), negatives)
    return num_images * (cosines / temperature).exp().mean()


class Normalizer(nn.Module):
    """The constant Z of a softmax over a memory bank, estimated in the first step (eq. 8).

    It is equal on every rank, and saved and resumed as a buffer. Methods call ``of`` in
    ``on_forward`` and ``keep`` in ``on_update``.
    """

    value: Tensor
    """Scalar; 0 if not yet known."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(()))
        self.is_known = False  # same as ``value > 0``, without waiting for the device

    @torch.no_grad()
    def of(
        self, features: Tensor, memory: MemoryBank, negatives: Tensor, temperature: float
    ) -> Tensor:
        """Return Z, or an estimate from the images of all ranks until it is known.

        Every rank must call it.

        Args:
            features: Features of this rank's images, (B, D), not necessarily normalized.
            memory: Entries of all images.
            negatives: Indices of entries drawn for each image, (B, K).
            temperature: Divisor of the cosines, tau.

        Returns:
            A scalar, equal on every rank.
        """
        if self.is_known:
            return self.value
        estimate = estimate_normalizer(features, memory[negatives], temperature, len(memory))
        return all_reduce_mean(estimate)

    @torch.no_grad()
    def keep(self, estimate: Tensor) -> None:
        """Keep an estimate, a scalar from ``of``, for the rest of the run; ignore later ones."""
        if not self.is_known:
            self.value.copy_(estimate)
            self.is_known = True

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.is_known = bool(self.value > 0)


def _similarities(
    features: Tensor, positive: Tensor, negatives: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return cosine / temperature of features (B, ..., D) with positives and K negatives.

    Args:
        features: (B, ..., D), normalized here.
        positive: Unit vectors, one for each of ``features``.
        negatives: Unit vectors (B, K, ..., D).
        temperature: Divisor of the cosines.
    """
    unit = F.normalize(features, dim=-1)
    right = (unit * positive).sum(dim=-1)
    wrong = torch.einsum("b...d,bk...d->bk...", unit, negatives)
    return right / temperature, wrong / temperature
