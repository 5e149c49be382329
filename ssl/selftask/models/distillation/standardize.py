"""Standardization of teachers' features by their running mean and variance.

S: number of features of all teachers together; D: number of features of one teacher; W: ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from selftask.distributed.collectives import all_gather_cat

_EPS = 1e-6  # added to variances


class Moments(NamedTuple):
    """Mean and (biased) variance of each feature."""

    mean: Tensor
    """(S,)."""
    variance: Tensor
    """(S,)."""


class RunningMoments(nn.Module):
    """Moving averages of the moments of S features, equal on every rank, saved and resumed."""

    mean: Tensor
    variance: Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("variance", torch.ones(num_features))

    @property
    def moments(self) -> Moments:
        """Running mean and variance."""
        return Moments(self.mean, self.variance)

    def moved(self, batch: Moments, share: float) -> Moments:
        """Return the moments after an update by a batch of weight ``share``; do not store them."""
        gap = batch.mean - self.mean
        mean = self.mean + share * gap
        variance = self.variance.lerp(batch.variance.to(self.variance.dtype), share)
        return Moments(mean, variance + share * (1 - share) * gap.square())

    def keep(self, moments: Moments) -> None:
        """Store the result of ``moved``."""
        self.mean.copy_(moments.mean)
        self.variance.copy_(moments.variance)


def standardize(features: list[Tensor], moments: Moments) -> list[Tensor]:
    """Standardize the features of several networks to mean 0 and variance 1.

    Args:
        features: Features of several networks, (..., D) each.
        moments: Moments of these features, concatenated.

    Returns:
        Features of the same shapes.
    """
    widths = [part.shape[-1] for part in features]
    means, variances = (values.split(widths) for values in moments)
    return [
        (part - mean) / (variance + _EPS).sqrt()
        for part, mean, variance in zip(features, means, variances, strict=True)
    ]


@torch.no_grad()
def moments_of(features: list[Tensor]) -> Moments:
    """Return mean and variance of each feature over the images and patches of all ranks, (S,) each.

    Every rank must call this function, with the same number of images.

    Args:
        features: Features of each network, (..., D). D may differ between networks; S is the sum
            over networks.
    """
    each = [torch.var_mean(part.flatten(0, -2), dim=0, correction=0) for part in features]
    variances, means = zip(*each, strict=True)
    of_rank = torch.stack([torch.cat(means), torch.cat(variances)])  # (2, S)
    every_mean, every_variance = all_gather_cat(of_rank[None]).unbind(1)  # (W, S) each
    between, mean = torch.var_mean(every_mean, dim=0, correction=0)
    return Moments(mean, every_variance.mean(dim=0) + between)
